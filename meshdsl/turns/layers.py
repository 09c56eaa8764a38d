"""A scan over layers, by what it is given and what it makes."""

from collections.abc import Sequence
from dataclasses import dataclass

from meshdsl.ir import Graph, Op, Value
from meshdsl.trace.graphs import Atom


@dataclass(frozen=True)
class Layers:
    """A scan over layers, taken apart."""

    op: Op

    @property
    def body(self) -> Graph:
        """One layer."""
        return self.op.bodies[0]

    @property
    def length(self) -> int:
        """How many layers there are."""
        return int(self.op.params["length"])

    @property
    def consts(self) -> Sequence[tuple[Atom, Value]]:
        """Per const, what it is outside and inside."""
        count = self.op.params["num_consts"]
        return list(zip(self.op.inputs[:count], self.body.inputs[:count], strict=True))

    @property
    def carries(self) -> Sequence[tuple[Atom, Value]]:
        """Per carry, what it starts from and what it is inside."""
        first, count = self.op.params["num_consts"], self.op.params["num_carry"]
        return list(zip(self.op.inputs, self.body.inputs, strict=True))[first : first + count]

    @property
    def stacks(self) -> Sequence[tuple[Value, Value]]:
        """Per stack, what it is outside and what a layer has of it."""
        first = self.op.params["num_consts"] + self.op.params["num_carry"]
        pairs = list(zip(self.op.inputs, self.body.inputs, strict=True))[first:]
        return [(x, v) for x, v in pairs if isinstance(x, Value)]  # a literal has no dim to go over

    @property
    def last(self) -> Sequence[Value]:
        """What the carries come to."""
        return self.op.outputs[: self.op.params["num_carry"]]

    @property
    def rows(self) -> Sequence[tuple[Atom, Value]]:
        """Per stack that the layers make, what a layer makes of it and what it is outside."""
        return list(zip(self.body.returned[len(self.last) :], self.made, strict=True))

    @property
    def made(self) -> Sequence[Value]:
        """Stacks that the layers make."""
        return self.op.outputs[self.op.params["num_carry"] :]
