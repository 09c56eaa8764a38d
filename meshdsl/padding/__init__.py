"""Padding of uneven dims: a vocabulary of 50,257 on 8 devices.

Problem. Blocks of a split dim are equal, so a dim of 50,257 cannot be split over 8 devices; padded to 50,264 it can.
Arrays at the step's boundary keep their size: a parameter is padded where it is used, a result is sliced where it
leaves, and between them the program runs on the longer dim:

    params/embed [50257, 768] --pad--> [50264, 768] --dot_general--> logits [2048, 50264]
                 --mask with -inf--> reduce_max    --mask with 0--> reduce_sum ... --slice--> [50257, 768]

Invariant. What the padding holds never reaches an element that is kept, infinities and NaN included: ``0 * inf`` is
NaN, so a product needs zeros in the padding of *both* operands.

Method. ``rules.dim_groups`` says which dims have to be padded together, and what their padding has to hold: anything
where an operation preserves the dim, the identity of the reduction where it sums it away. For windows and
reshapes, whose dims differ in length, ``resized_dims`` says so. Two steps:

    min_cut        where to pad and where to slice: around products, convolutions, lookups and reductions, by a minimum
                   cut of copied bytes
    rewrite        the padded program

``regions`` computes parts of dims that are only reduced where they lie, which makes lengths go that do not divide.

``uneven_pins`` turns pins that do not divide into constraints, which such a program can meet.

Entry points: ``padded_sizes`` (candidate lengths), ``pad_program`` and ``padded_variant``. Nothing is planned here:
``api.plan_variants`` plans with and without padding and takes the faster. The padded program is an ordinary program;
rules, planner, memory, lowering and ``verify`` know nothing of padding, and only ``check`` compares it with the step as
it was written.
"""

from meshdsl.padding.rewrite import pad_program

__all__ = ["pad_program"]
