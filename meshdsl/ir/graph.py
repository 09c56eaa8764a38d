"""The graph that is planned: a training step as values and operations.

    program ::= graph, paths of its inputs and outputs
    graph   ::= inputs, operations, the last one being "return"; executed `trips` times a step
    op      ::= primitive [params] inputs -> outputs          (any other name)
              | "scan"  consts, carry, xs -> carry, ys        one body
              | "while" cond_consts, body_consts, carry -> carry    two bodies: condition, body
              | "cond"  index, operands -> results            one body per branch
              | "constant" -> value                           an array closed over
              | "constrain" value -> value                    a layout specified by the user
              | "enter_shard_map" array -> block              a device's block of an argument of the user's shard_map
              | "leave_shard_map" block -> array              the result whose blocks the devices have
              | "to_device" value -> value                    what is in the host's memory, brought to the device
              | "to_host" value -> value                      what is on the device, sent to the host's memory
              | "return" values ->                            ends every graph
    input   ::= value | literal

Every value is defined once, as a graph input or by one operation, and before its uses, which are in the same graph. A
body sees nothing of the graph around it but its own inputs: values that a loop closes over are passed as consts.
``check.check_graph`` enforces the grammar.

Between entering and leaving a shard_map, its mesh axes are *manual*: values have the shape of one device's block and
differ from device to device, so no layout may split or reduce them over these axes (see ``manual``).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any, ClassVar, NamedTuple

from meshdsl.layouts.low_bits import LowBits
from meshdsl.layouts.roundness import POWERS_OF_TWO, Roundness
from meshdsl.schedules.pipelined import Pipelined

LOOPS = ("scan", "while", "cond")


@cache
def element_bits(dtype: Any) -> int:
    """Returns the bits of an element. Devices pack numbers of 2 and of 4 bits; numpy gives each of them a byte."""
    packed = _PACKED.match(getattr(dtype, "name", ""))
    return int(packed.group(1)) if packed else 8 * int(getattr(dtype, "itemsize", 8))


def sent_itemsize(itemsize: float) -> float:
    """Returns the bytes in which collectives send an element of ``itemsize`` bytes: integers of 2 bits go as bytes."""
    return 1.0 if 0 < itemsize < 0.5 else itemsize


_PACKED = re.compile(r"(?:u?int|float)([24])(?:_|$)")


@dataclass(eq=False, slots=True)
class Value:
    """A tensor: ``shape`` in elements, ``dtype`` as numpy or jax names it; identity is ``id``."""

    id: int
    shape: tuple[int, ...]
    dtype: Any

    @property
    def itemsize(self) -> float:
        """Bytes per element: whole ones, or halves and quarters of numbers that are shorter than a byte."""
        return element_bits(self.dtype) / 8

    @property
    def bytes(self) -> int:
        """Bytes of the whole tensor."""
        return -(-prod(self.shape) * element_bits(self.dtype) // 8)


@dataclass(eq=False, slots=True)
class Literal:
    """A scalar constant; its ``id`` belongs to no value."""

    id: ClassVar[int] = -1
    value: Any
    shape: tuple[int, ...]
    dtype: Any


Atom = Value | Literal


@dataclass(frozen=True)
class Source:
    """The user's line of an operation."""

    file: str = ""
    line: int = 0
    function: str = ""

    def __str__(self) -> str:
        return f"{self.file.rsplit('/', 1)[-1]}:{self.line}" if self.file else "?"


@dataclass(eq=False, slots=True, weakref_slot=True)
class Op:
    """One operation.

    Args:
      name: the primitive's name, or a name of the grammar above.
      primitive: the JAX primitive to bind when it runs; None for the structured ones.
      params: the primitive's parameters at global shapes.
      phase: "forward", "backward" or "optimizer".
      scope: the name stack, "/"-separated.
      bodies: graphs of a loop or conditional.
      effects: it does more than return its results, so it stays even without uses.
      manual: mesh axes over which the user's program divides it: those of the shard_maps around it.
    """

    id: int
    name: str
    primitive: Any
    params: dict[str, Any]
    inputs: tuple[Atom, ...]
    outputs: tuple[Value, ...]
    source: Source = Source()
    phase: str = "forward"
    scope: str = ""
    bodies: tuple["Graph", ...] = ()
    effects: bool = False
    manual: tuple[str, ...] = ()

    def between(self, inputs: tuple[Atom, ...], outputs: tuple[Value, ...]) -> "Op":
        """Returns the operation with other operands and results; faster than ``dataclasses.replace``."""
        return Op(
            self.id,
            self.name,
            self.primitive,
            self.params,
            inputs,
            outputs,
            self.source,
            self.phase,
            self.scope,
            self.bodies,
            self.effects,
            self.manual,
        )

    @property
    def called(self) -> str:
        """The name to display: a function with a rule has its own, a constraint by jax that of its function."""
        return str(getattr(self.params.get("ruled"), "name", self.params.get("by", self.name)))


@dataclass(eq=False, slots=True, weakref_slot=True)
class Graph:
    """Operations in order; the last is "return".

    Args:
      trips: iterations per step, all enclosing loops counted.
      estimated: ``trips`` is a guess (inside a ``while``).
      hosted: of a step, the positions of the inputs that are in the host's memory (see ``host``).
    """

    inputs: tuple[Value, ...]
    ops: tuple[Op, ...]
    trips: int = 1
    estimated: bool = False
    hosted: frozenset[int] = frozenset()

    @property
    def returned(self) -> tuple[Atom, ...]:
        """The values that the graph returns."""
        return self.ops[-1].inputs


@dataclass(frozen=True)
class Leaf:
    """One array of the step's arguments or results.

    Args:
      path: the path that globs match.
      weak: it is weakly typed, as a Python scalar.
      dims: names of its dims, "" for a dim without one; empty if no dim has one.
      aliases: other paths that lead to the same array, which is one input.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    weak: bool = False
    dims: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        """All paths of the array."""
        return (self.path, *self.aliases)

    @property
    def type(self) -> str:
        """Dtype and shape: ``float32[8,16]``, or ``float32[embed=8 hidden=16]``."""
        return array_type(self.dtype, self.shape, self.dims)


def array_type(dtype: Any, shape: Sequence[int], dims: Sequence[str]) -> str:
    """Returns an array type as text, sizes with the names of their dims."""
    named = [f"{name}={size}" if name else str(size) for name, size in zip(dims, shape, strict=False)]
    return f"{dtype}[{' '.join(named) if dims else ','.join(map(str, shape))}]"


@dataclass(frozen=True)
class HeldState:
    """State in objects of the caller, which a step changes in place.

    Args:
      inputs: the inputs that are such state.
      written: for each output that is new state, the input that it replaces.
      results: the number of outputs that the step returns, which come first; None for all.
    """

    inputs: frozenset[int] = frozenset()
    written: Mapping[int, int] = field(default_factory=dict)
    results: int | None = None


class FunctionChoice(NamedTuple):
    """Functions with equal results in a step, of which one was traced (``md.alternatives``).

    Args:
      name: of what is chosen.
      taken: name of the function that was traced.
      names: of all of them, in the order given.
    """

    name: str
    taken: str
    names: tuple[str, ...]


@dataclass(eq=False)
class TracedProgram:
    """A traced step: ``inputs`` and ``outputs`` run parallel to the graph's.

    Args:
      held: state that it changes in place.
      notes: remarks for the reader of the plan.
      warnings: those of the notes by which the program means something else than the step says.
      roundness: which lengths the mesh divides, by which its dims were aligned.
      checkpoints: the step's ``jax.checkpoint`` is as it was written; else it has been taken out.
      spread: it contains shardings or shard_maps of jax's own, so that it runs only on several devices.
      pipeline: its microbatches and pipeline stages, if it has any.
      unstaged: its graph before it was cut into pipeline stages, the whole batch at once; None without stages.
      low_bits: how much its collectives may round what they send; None for nothing.
      alternatives: the choices of ``md.alternatives`` that it was traced with, in the order in which it says them.
    """

    graph: Graph
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    in_tree: Any = None
    out_tree: Any = None
    name: str = "step"
    held: HeldState = field(default_factory=HeldState)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    roundness: Roundness = POWERS_OF_TWO
    checkpoints: bool = True
    spread: bool = False
    pipeline: Pipelined | None = None
    unstaged: Graph | None = None
    low_bits: LowBits | None = None
    alternatives: tuple[FunctionChoice, ...] = ()

    @property
    def taken(self) -> tuple[tuple[str, str], ...]:
        """The functions taken of its alternatives, by the name of what was chosen."""
        return tuple((each.name, each.taken) for each in self.alternatives)


def walk(graph: Graph) -> Iterator[tuple[Graph, Op]]:
    """Yields every operation with the graph that contains it; a loop comes before its bodies."""
    for op in graph.ops:
        yield graph, op
        for body in op.bodies:
            yield from walk(body)
