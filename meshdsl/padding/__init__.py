"""Uneven dims: a vocabulary of 50,257 on 8 devices.

Blocks of a split dim are equal, so a dim of 50,257 cannot be split over 8 devices. Padded to
50,264 it can. Arrays at the step's boundary keep their size: a parameter is padded where it is
read, a result is cut where it leaves, and in between the program runs on the longer dim:

    params/embed [50257, 768] --pad--> [50264, 768] --dot_general--> logits [2048, 50264]
                 --mask with -inf--> reduce_max    --mask with 0--> reduce_sum ... --slice--> [50257, 768]

1. ``strands`` reads from the rule of every operation which of its dims are padded together,
   and what their padding has to hold: nothing in particular where an operation keeps the dim
   (the padding of a result comes from the padding of the operands), the identity of the
   reduction where it sums the dim away.
2. ``cut`` decides where to pad and where to slice: around the matrix products and lookups, by
   a cut of fewest bytes.
3. ``rewrite`` makes the padded program. What the padding holds never reaches an element that
   is kept, infinities and NaN included: ``0 * inf`` is NaN, so a product needs zeros in the
   padding of *both* operands.
4. ``meshdsl.api.plan_variants`` plans with and without, and keeps what the planner finds faster.

The padded program is an ordinary program: rules, planner, memory, lowering and ``verify`` know
nothing of all this. Only ``check`` compares it with the step as it was written.
"""

from meshdsl.padding.rewrite import pad_program

__all__ = ["pad_program"]
