"""Strategy choice under a memory limit at every time point: the planner's problem in its barest form.

Every node takes one of its strategies; nodes and edges cost something in each choice; no time point may use more
memory than the limit. These are the instances of the ASPLOS / EuroSys 2025 contest on intra-operator parallelism
(github.com/google/iopddl). ``load_instance`` reads one and ``solve`` finds a choice, with a lower bound in exact
integers.

Modules in the order in which an instance meets them:

* ``instance``: the problem, its file format, and its *core*, a pairwise network with memory usages;
* ``presolve``: exact reductions (arc consistency, dominated states, merged variables);
* ``lagrangian``: shadow prices of memory by subgradient steps on TRW-S messages (Kolmogorov 2006), and the bound;
* ``local_search``: large moves: forests solved by dynamic programming, narrow graphs by bucket elimination;
* ``mip``: known choices and promising states combined by a mixed-integer program (HiGHS);
* ``solve``: these stages in rounds until the time is up;
* ``kernels``, ``bucket_kernels``: compiled loops, imported inside functions since numba takes seconds to import.
"""

from meshdsl.planner.contest.instance import Instance, Score, load_instance
from meshdsl.planner.contest.solve import Answer, solve

__all__ = ["Answer", "Instance", "Score", "load_instance", "solve"]
