"""Finding a good plan, memory aside: primal heuristics on the networks of a model, and the bound that they end with.

Modules, in order:

* ``local_search``: improves a given plan. Coordinate descent over mesh axes, each axis solved exactly
  (``AxisDescent``); large-neighbourhood search (``lns``, Shaw 1998), whose driver the memory search shares; and rounds
  that close the gap between plan and bound (``close_gap``).
* ``search``: the entry point. An initial plan from messages, then local search and pruning; on meshes of three axes or
  more, from neighbourhood to neighbourhood of the best plan.
* ``tie_break``: among plans of equal cost, one with the fewest distinct layouts.

Entry points: ``search``, which returns a ``SearchOutcome`` (the plan, and a lower bound that is raised when it is
read); ``priced_plans`` for the memory search; ``fewest_layouts``.
"""
