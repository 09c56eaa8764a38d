"""Certificates: lower bounds on the cost of every plan, whatever the memory limit.

A certificate is the relaxed network of a model (``encoding.NetworkBuilder.bounds``) with its messages. To raise it
means: pass messages (TRW-S), prune states whose min-marginal exceeds the incumbent, rebuild the network from the
remaining states with exact trees for more values, and eliminate small remainders exactly (``planner.mrf``).

Modules, in order:

* ``certificate``: ``Certificate``, a bound that can be raised, one operation at a time.
* ``tighten``: how far a bound is raised: passes in stages (``raise_bound``), rounds of pruning and rebuilding
  (``PruningRounds``), and all of it for meshes of many axes (``bound_on_many_axes``).
* ``trivial``: bounds on seconds and memory that need no model, for choosing among meshes.

Bounds on the plans within a memory limit stand on these: ``memory.dual``.
"""
