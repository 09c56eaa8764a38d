"""The rule of a call that is made for what it does, and returns something: it is made once.

The first device makes it, the others have zeros: so its results are partial sums on every axis,
and partial maxima where they are bools. Who reads them decides how they are put together.
"""

import jax.numpy as jnp

from meshdsl.ir import Op
from meshdsl.layouts.placement import B, P
from meshdsl.layouts.rule import Rule, Signature
from meshdsl.rules.registry import rule
from meshdsl.rules.structural import named


@rule("io_callback")
def once(op: Op) -> Rule:
    """Whole operands, partial results, and nothing else."""
    whole, none = (B,) * len(op.inputs), tuple(named(*(None for _ in v.shape)) for v in op.outputs)
    held = tuple(P("max") if v.dtype == jnp.bool_ else P for v in op.outputs)
    copies = {(whole, (B,) * len(op.outputs))} if op.outputs else set()
    operands = tuple(named(*(None for _ in x.shape)) for x in op.inputs)
    return Rule(operands, none, extra=(Signature(whole, held),), without=frozenset(copies))
