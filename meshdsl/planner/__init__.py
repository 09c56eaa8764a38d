"""Choose a sharding for every op of a training step.

See ``solve`` for the stages.
"""

from meshdsl.ir.solution import Pins, Solution
from meshdsl.planner.solve import SearchResult, solve

__all__ = ["Pins", "SearchResult", "Solution", "solve"]
