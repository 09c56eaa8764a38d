"""Values that are known while tracing: of operations on constants alone, through the boundaries of loops.

    i = iota 8; j = add i 1; k = rem j 8        k = [1, 2, ..., 7, 0]

They are computed by the primitives themselves, where a pass asks for them, and only up to a size. Random keys, and what
is drawn from them, stay unknown: some generators draw other numbers on other devices. So does what depends on the
device: its position, which the body of a ``shard_map`` may read, and its platform.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from meshdsl.ir.graph import Atom, Literal, Op
from meshdsl.ir.loops import loop_ports
from meshdsl.rules.shard_map import KINDS

_OF_DEVICES = frozenset({*KINDS, "axis_index", "platform_index"})
_LARGEST = 1 << 16  # elements of the largest array that is computed while tracing


@dataclass
class KnownValues:
    """Producers of the values of a graph and of the graphs around it.

    Args:
      makers: by value id, the operation that makes it.
      outside: by id of a body's input that is the same in every iteration, the operand of the loop.
      values: the values of the constant expressions computed so far, by value id; None where unknown.
    """

    makers: dict[int, Op] = field(default_factory=dict)
    outside: dict[int, Atom] = field(default_factory=dict)
    values: dict[int, NDArray[Any] | None] = field(default_factory=dict)

    def enter(self, op: Op) -> None:
        """Records an operation and the invariant operands of its bodies."""
        self.makers.update((v.id, op) for v in op.outputs)
        for port in loop_ports(op):
            if port.invariant:
                self.outside.update((op.bodies[body].inputs[i].id, op.inputs[port.operand]) for body, i in port.inputs)

    def value(self, x: Atom) -> NDArray[Any] | None:
        """Returns the value of the constant expression ``x``; None for other values, and for large ones."""
        waiting = [x]
        while waiting:
            at = waiting[-1]
            read = [] if self._is_known(at) else [y for y in self._operands(at) if not self._is_known(y)]
            if not read:
                waiting.pop()
            if not read and not self._is_known(at):
                self.values[at.id] = self._computed(at)
            waiting += read
        return _of_literal(x) if isinstance(x, Literal) else self.values[x.id]

    def _is_known(self, x: Atom) -> bool:
        return isinstance(x, Literal) or x.id in self.values

    def _operands(self, x: Atom) -> Sequence[Atom]:
        """Returns the operands of ``x``; none if it cannot be computed while tracing."""
        if x.id in self.outside:
            return (self.outside[x.id],)
        op = self.makers.get(x.id)
        return () if op is None or not _is_computable(op, x) else op.inputs

    def _computed(self, x: Atom) -> NDArray[Any] | None:
        """The value of ``x``, whose operands have been computed."""
        operands = [self.value(y) for y in self._operands(x)]
        if x.id in self.outside:
            return operands[0]
        op = self.makers.get(x.id)
        if op is not None and op.name == "constant" and prod(x.shape) <= _LARGEST:
            value = op.params["value"]
            return value if isinstance(value, np.ndarray) else None
        if op is None or not _is_computable(op, x) or any(y is None for y in operands):
            return None
        with jax.ensure_compile_time_eval():
            return np.asarray(op.primitive.bind(*operands, **op.params))


def _of_literal(x: Literal) -> NDArray[Any] | None:
    return np.asarray(x.value) if isinstance(x.value, np.generic) else None


def _is_computable(op: Op, x: Atom) -> bool:
    """Whether the primitive computes ``x`` from its operands alone, whatever the device."""
    if op.bodies or op.effects or op.primitive is None or op.primitive.multiple_results or op.name in _OF_DEVICES:
        return False
    return prod(x.shape) <= _LARGEST and not jax.numpy.issubdtype(x.dtype, jax.dtypes.extended)
