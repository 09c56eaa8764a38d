"""The planning problem over all mesh axes jointly, encoded as pairwise cost networks (``planner.mrf``).

Every node of the problem is a variable whose states are its joint signatures. A value with one consumer is a table
between producer and consumer. A value with several consumers is resharded along a tree (a tensor gathered for one
consumer is free for the next): a minimum Steiner arborescence in the graph of layouts, whose forks become auxiliary
variables, *hubs*. With two consumers one hub is exact. With more there are two encodings: ``plans``, restricted trees
whose cost a plan can attain (an upper bound), and ``bounds``, relaxed trees that no plan can undercut (a lower bound).

Modules, in order:

* ``hubs``: domains of the nodes, tables of reshard and memory costs, and the exact part: values with at most two
  consumers.
* ``steiner_variables``: exact trees for many consumers, as variables over sets of layouts (Dreyfus and Wagner 1971) or
  over pairs of forks.
* ``fanout``: relaxations for values whose exact trees are too large, each tight at a given plan.
* ``blocks``: repeated layers, encoded once and replicated.
* ``networks``: ``NetworkBuilder``, which combines these to the two networks of a model.
* ``reduced_depth``: messages of a step with fewer repeated layers, transferred to the whole step.
* ``projection``: lower bounds from pairs of mesh axes, where all axes together have too many states.
* ``kernels``: a bound from messages that many variables share, compiled with numba.

Entry point: ``NetworkBuilder``, with ``plans()``, ``bounds(best)``, ``reduced_plans(weigh_layers)`` and
``priced(model)``.
"""
