"""The planner: a layout for every value of a whole training step, close to the proved optimum.

See ``problem`` for the optimisation problem, ``search`` for how it is solved, ``bound`` for the
certificate, ``closing`` for how both meet, and ``fit`` for the memory limit.
"""

from meshdsl.ir.solution import Pins, Solution
from meshdsl.planner.solve import solve

__all__ = ["Pins", "Solution", "solve"]
