"""What operations and reshards cost: the two terms of the planner's objective, as arrays.

    seconds = sum over operations of iterations * op_cost  +  sum over values of iterations * (resharding tree)

* ``fixed_point``: seconds and tie-breakers as exact integers;
* ``op_cost``: seconds of an operation in every joint signature (roofline model: Williams, Waterman and Patterson 2009);
* ``reshard_cost``: seconds of the cheapest reshard between any two layouts (alpha-beta model, Bellman-Ford), and the
  domains of layouts that a search considers;
* ``steiner``: the cheapest resharding tree from one layout to several (Dreyfus and Wagner 1971);
* ``kernels``: compiled loops, imported inside functions since numba takes seconds to import.

Entry points: ``make_table``, ``ReshardCosts``, ``LayoutDomains``, ``steiner_tree``, ``FixedPoint``.
"""
