"""Rows that ranks send each other, as many as the data says (``md.ragged_exchange``).

A device that has all ranks looks their rows up. Devices that split the ranks exchange them: in one collective that
sends these rows alone, or in rounds of all-to-alls with equal slots for every pair of ranks, where the topology's
compiler has no such collective. A ragged exchange is planned as sending what fills the smaller of the rows that ranks
have and the rows that they can take, evenly. A round has slots for the larger of the two, so that one is enough for
routing that is nearly balanced.
"""

from meshdsl.ir.graph import Op
from meshdsl.layouts.exchange import Exchange
from meshdsl.layouts.placement import B, S
from meshdsl.layouts.sharding_rule import Dims, Rule, Signature
from meshdsl.rules.registry import rule


@rule("ragged_exchange")
def ragged_exchange(op: Op) -> Rule:
    """Batches and features by themselves; rows are moved, and exchanged where ranks are split."""
    ranks = len(op.inputs[0].shape) - 3
    batch = tuple((f"b{i}",) for i in range(ranks))
    rows: Dims = (*batch, (), (), ("features",))
    exchange = Exchange("ragged" if op.params["ragged"] else "rounds", exchanged_port(op), ranks)
    split = Signature((S(ranks), B), (S(ranks),), collectives=(exchange,))
    return Rule((rows, (*batch, (), ())), (rows,), commuting=((0,),), extra=(split,))


def exchanged_port(op: Op) -> int:
    """Returns the operand or result that has as many rows as a planned exchange sends."""
    given, taken = op.inputs[0].shape[-2], op.outputs[0].shape[-2]
    return 0 if (given < taken) == op.params["ragged"] else 2
