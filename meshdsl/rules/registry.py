"""The registry of rules by primitive name, and the table of an operation."""

from collections.abc import Callable

from meshdsl.ir import Literal, Op
from meshdsl.layouts.placement import B
from meshdsl.layouts.rule import Row, Rule

RuleOf = Callable[[Op], Rule]
RULES: dict[str, RuleOf] = {}


def rule(*names: str) -> Callable[[RuleOf], RuleOf]:
    """Register a function from an operation to its rule, for primitives of these names."""

    def register(make: RuleOf) -> RuleOf:
        for name in names:
            RULES[name] = make
        return make

    return register


def rows_of(op: Op) -> tuple[Row, ...]:
    """The one-axis table of ``op``; the all-``B`` row alone where no rule is registered."""
    made = RULES.get(op.name)
    if made is None:
        return (all_broadcast(op),)
    literal = [i for i, x in enumerate(op.inputs) if isinstance(x, Literal)]
    return tuple(row for row in made(op).rows() if all(row.inputs[i] is B for i in literal))


def all_broadcast(op: Op) -> Row:
    """Every operand and result ``B``: legal for any operation."""
    return Row((B,) * len(op.inputs), (B,) * len(op.outputs))
