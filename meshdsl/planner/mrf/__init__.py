"""Pairwise cost networks (Markov random fields) and their minimisation; nothing here knows layouts or steps.

A network is a sum of tables over discrete variables, one or two variables each. Its minimum is the cheapest state of
all variables together. The same code serves the planner's encodings and the contest solver (``planner.contest``).

Modules, in order:

* ``network``: the network itself, exact reduction of variables with at most two neighbours (which keeps it pairwise),
  replicas of repeated parts, and a memo that lets equal parts share their tables.
* ``elimination``: bucket elimination (Dechter 1999) for tables of any arity, and mini-bucket lower bounds
  (Dechter and Rish 2003).
* ``trws``: sequential tree-reweighted message passing (TRW-S, Kolmogorov 2006) on networks laid out flat: a lower bound
  that rises, a decoded state, reparametrisation, and pruning of states by their min-marginals.
* ``kernels``: the loops of ``trws``, compiled with numba. Imported inside functions, for the compiler takes seconds.

Entry points: ``Network``, ``eliminate``, ``lower_bound``, ``TRWS``.
"""
