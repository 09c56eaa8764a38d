"""Pins: the layouts that the user fixed, resolved for a program and checked before anything is planned.

Pins come from globs over paths of arguments and results, from layout rules over named dims (flax's logical axes), and
from ``constrain`` operations inside the step. The planner treats them as constraints on the domains of its variables.

    read         globs -> a layout per input and output; results that alias an input take its layout   ``make_pins``
    strategies   data parallelism, FSDP, tensor parallelism -> layouts of single inputs          ``LayoutTable``
    sharding_trees  pytrees of layouts at one glob -> a row per leaf                               ``spread``
    given        where the arguments of a call lie already -> layouts of inputs                  ``GivenLayouts``
    axis_rules   layout rules -> layouts, by the kind of an array: parameter, optimizer state, activation
    constraints  what jax's own functions state inside the step, fitted to the mesh                 ``fit_constraints``
    shard_maps   the mesh of the user's shard_maps, compared with the plan's
    conflicts    faults of a pin of one array; minimal sets of pins that contradict each other

``UserPins`` is the value that the stages pass on: every rewrite of a program resolves it for the new program.
"""

from meshdsl.pins.constraints import fit_constraints
from meshdsl.pins.given import AS_GIVEN, GivenLayouts, place_of
from meshdsl.pins.read import UserPins, make_pins, nearly_replaced, overridden_pins, replaced_inputs
from meshdsl.pins.sharding_trees import spread
from meshdsl.pins.strategies import LayoutTable, ResolvedTable

__all__ = [
    "AS_GIVEN",
    "GivenLayouts",
    "LayoutTable",
    "ResolvedTable",
    "UserPins",
    "fit_constraints",
    "make_pins",
    "nearly_replaced",
    "overridden_pins",
    "place_of",
    "replaced_inputs",
    "spread",
]
