"""The planner: a layout for every value of a whole training step, close to the proved optimum.

See ``problem`` for the optimisation problem, ``sweep`` for how it is solved, ``bound`` for the
certificate and ``memory`` for the memory limit.
"""

from meshdsl.planner.solution import Pins, Solution
from meshdsl.planner.solve import solve

__all__ = ["Pins", "Solution", "solve"]
