"""The memory limit: at every program point, the live bytes of a plan may not exceed it.

The constraint couples all variables, so it is relaxed: bytes get a price where the limit binds (Lagrangian relaxation
with lazily generated constraints), which leaves the problem without a limit, at other costs. A price only finds plans
that are cheapest at some price; the gap between these is closed by recombining plans, and by exact search on small
steps. The same relaxation gives the lower bound.

Modules, in order:

* ``lower_bound``: the bytes that memory certainly holds while an op runs, as terms that a network can price.
* ``pricing``: the priced program points, and the prices of all ports there.
* ``combine``: crossover of two plans; which parts to adopt is a knapsack.
* ``branch_and_bound``: exact search on small steps (Land and Doig 1960); neighbourhood search within the limit.
* ``infeasible``: the error when no plan fits.
* ``fit``: ``MemoryFitter``, the phases of the search, each of which passes a ``FitResult`` on.
* ``dual``: the lower bound, maximised over the price with cutting planes (Kelley 1960).

Entry points: ``MemoryFitter.fit``, ``.bisect``, ``.improve``, ``.prove``; ``dual_bound``.
"""
