"""Choose a sharding for every op of a training step: a constrained minimisation, solved with a certified gap.

Problem (``problem``). One variable per op (and per input); its states are joint signatures, one row of the op's rule
per mesh axis, which fix the layouts of its operands and results.

    minimise    sum over nodes n of   trips(n) * op_cost(n, x_n)
              + sum over values v of  trips(v) * steiner(v; layout at its producer, layouts at its consumers)
    subject to  pins and divisibility, and at every program point  live_bytes(x) <= memory

The second sum is a minimum Steiner arborescence in the graph of layouts: a tensor gathered for one consumer is free for
the next. Without it the problem would be a pairwise Markov random field; with it, and with the memory limit, it is NP-
hard in several ways at once. The planner therefore searches for an assignment and bounds the optimum from below.

Stages (``solve``), each with its package:

    1. costs      roofline time of every op; all-pairs shortest reshards per shape                 costs
    2. problem    variables, domains and ports as arrays; repeated layers are found                problem
    3. encoding   two pairwise networks: ``plans`` (restricted trees, whose cost a plan attains:   encoding, mrf
                  an upper bound) and ``bounds`` (relaxed trees: a lower bound)
    4. messages   TRW-S (Kolmogorov 2006) raises the lower bound and decodes to an assignment      mrf, bounds
    5. search     exact descent over single mesh axes, large-neighbourhood search (Shaw 1998), and  search
                  rounds of reduced-cost pruning until bound and plan meet
    6. memory     if the plan exceeds the limit: Lagrangian prices on program points, crossover    memory, liveness
                  by knapsack, neighbourhood search, branch and bound on small steps; for the
                  bound, the Lagrangian dual by cutting planes (Kelley 1960)
    7. tie-break  of equally cheap plans the one with the fewest distinct layouts                   search
    8. buckets    small collectives that are sent as one, at the fewest points (Gavril 1972)       buckets

Everything is deterministic: work is counted in table entries, with all limits in ``limits.SearchLimits``; a deadline
only skips improvements. ``contest`` solves the instances of a published planning contest with the same ``mrf``.

Entry point: ``solve(program, mesh, pins)``, whose result has the named follow-ups ``polish``, ``certify``, ``replan``,
``with_overlap``, ``bucketed_solution``, ``with_shared_latency`` and ``at_unshared_latencies``. Modules here:
``limits``, ``objective`` (cost of an assignment), ``buckets``, ``unshared`` (latencies that no bucket shares) and
``solve``.
"""

from meshdsl.ir.solution import Pins, Solution
from meshdsl.planner.solve import SearchResult, solve

__all__ = ["Pins", "SearchResult", "Solution", "solve"]
