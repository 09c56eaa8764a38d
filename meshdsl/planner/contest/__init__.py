"""Strategy choice under a memory limit at every time point: the planner's problem in its barest form.

The instances of the ASPLOS / EuroSys 2025 contest on intra-operator parallelism are of this form
(github.com/google/iopddl). See ``instance`` for the problem and ``solve`` for how it is solved.
"""

from meshdsl.planner.contest.instance import Instance, Score, load_instance
from meshdsl.planner.contest.solve import Answer, solve

__all__ = ["Answer", "Instance", "Score", "load_instance", "solve"]
