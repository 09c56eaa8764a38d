"""What operations read from memory and write to it, as the compiler of the devices fuses them.

There are two models (``Topology.fusion``):

    chains     an elementwise value is fused into its only consumer, and written to memory if it has several
    kernels    elementwise operations of one size that wait for the same products and share operands are one kernel,
               which reads each operand once. What other kernels read is written, or computed again by each of them
               where that moves fewer bytes. Reductions along rows, such as those of softmax and normalisation, run in
               the kernel of what they reduce. A loop copies slices of its operands that products read, and slices of
               results that they make, and fills its results with zeros before it begins

The second follows XLA's passes for GPUs: priority fusion, multi-output fusion and fusion of softmax (openxla/xla,
``service/gpu/transforms``). It also suits programs compiled for TPUs (``docs/evidence/overlap.md``).

    y = x @ w ;  a = tanh(y) ;  b = a * a ;  z = a @ v      chains: y is read, a written; a is read, b written
                                                            kernels: y is read once, a and b are written
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from meshdsl.ir.graph import LOOPS, Graph, Literal, Op, Value
from meshdsl.ir.host import TRANSFERS
from meshdsl.ir.index import Flags, GraphBlock, GraphIndex, graph_index
from meshdsl.ir.loops import PortRole, loop_ports
from meshdsl.planner.costs.fusion import (
    IN_PLACE_UPDATES,
    PASSES_PER_COLUMN,
    READS_PART_OF_OPERAND,
    SLICES_OPERAND,
    VIEWS,
    ends_fusion,
    materialized,
)
from meshdsl.rules import RULES
from meshdsl.util.arrays import Ids, intern_ids
from meshdsl.util.lazy import memoize_by_object

# ---- What one operation moves ----------------------------------------------------------------------------------------


class Moved(NamedTuple):
    """What an operation moves.

    Args:
      accesses: per operand and result, how often its bytes are read or written.
      copied: the same of copies before and after the operation; empty if there are none.
      starts: kernels.
    """

    accesses: tuple[float, ...]
    copied: tuple[float, ...] = ()
    starts: int = 0


NOTHING = Moved(())


def accesses_alone(op: Op, reads: Sequence[float], writes: Sequence[float]) -> tuple[float, ...]:
    """Returns how often the bytes of operands and results are read or written by an operation.

    Args:
      reads: how often operands are read, if they are read whole.
      writes: how often results are written.
    """
    found = [*reads, *writes]
    if op.name in READS_PART_OF_OPERAND and reads:
        found[0] = 0
    if op.name in SLICES_OPERAND and reads[0]:
        found[len(reads)] += 1  # as many bytes are read as written
    elif op.name in VIEWS:
        found = [0] * len(found)
    elif op.name in IN_PLACE_UPDATES:  # in place; where the operand is needed later, its copy is the memory's concern
        found = [0] * len(found)
        found[IN_PLACE_UPDATES[op.name]] = 2
    elif op.name in PASSES_PER_COLUMN:
        found[0] *= max(1, round(PASSES_PER_COLUMN[op.name] * min(op.inputs[0].shape[-2:])))
    return tuple(found)


# ---- What all of a program move --------------------------------------------------------------------------------------


class ChainTraffic:
    """Every elementwise value is fused into its only consumer.

    Args:
      index: of the program.
      in_memory: [values], those in memory.
    """

    def __init__(self, index: GraphIndex, in_memory: Flags) -> None:
        self._index, self.in_memory = index, in_memory
        self.numbers: Ids = np.zeros(len(index.ops), dtype=np.intp)

    def of(self, op: Op) -> Moved:
        """Returns what an operation moves."""
        accesses = accesses_alone(op, *([self._counts(x) for x in some] for some in (op.inputs, op.outputs)))
        return Moved(accesses, starts=int(any(accesses)))

    def _counts(self, x: Value | Literal) -> int:
        return int(isinstance(x, Value) and self.in_memory[self._index.number_of(x.id)])


class KernelTraffic:
    """Operations that share operands are fused into kernels.

    Args:
      index: of the program.

    Attributes:
      in_memory: [values], none: what is in memory does not tell operations apart here.
      numbers: [positions], equal where operations move as much.
    """

    def __init__(self, index: GraphIndex) -> None:
        self.in_memory: Flags = np.zeros(len(index.values), dtype=np.bool_)
        self._moved = dict[int, Moved]()
        for block in index.blocks:
            self._moved |= _Kernels([op for op in index.ops[block.start : block.stop] if op], block).moved()
        self.numbers: Ids = intern_ids(self._moved[op.id] if op else None for op in index.ops)

    def of(self, op: Op) -> Moved:
        """Returns what an operation moves."""
        return self._moved[op.id]


Traffic = ChainTraffic | KernelTraffic


@memoize_by_object
def traffic_of(graph: Graph, fusion: str) -> Traffic:
    """Returns what the operations of a program and its bodies move.

    Args:
      graph: the program.
      fusion: the model, ``Topology.fusion``.
    """
    index = graph_index(graph)
    return KernelTraffic(index) if fusion == "kernels" else ChainTraffic(index, materialized(graph))


# ---- Kernels ---------------------------------------------------------------------------------------------------------

_MOST_SOURCES = 96  # operands and results of a kernel (openxla/xla, ``MaxOperandsAndOutputsPerFusion``)
_RENAMES = VIEWS | {"optimization_barrier", "constrain"}  # results are operands
_MOVES_NOTHING = _RENAMES | {"constant", "return", *LOOPS}
_FUSED_TOO = frozenset("gather slice dynamic_slice concatenate pad reduce_precision".split())


class _Kernels:
    """The kernels of one graph, without those of its bodies.

    Values are told apart by id; a view stands for what it is a view of. Operations run at a *level*: the products, and
    other operations of their own, on the longest way to them. So what is joined at one level never waits for itself.

    Args:
      ops: its operations.
      block: its inputs, and the loop whose body it is.
    """

    def __init__(self, ops: Sequence[Op], block: GraphBlock) -> None:
        self._ops, self._block = ops, block
        self._viewed = dict[int, int]()  # what a view is a view of
        self._bytes = {v.id: v.bytes for v in block.inputs}
        self._maker = dict[int, Op]()  # of what a kernel makes
        self._readers = defaultdict[int, list[Op]](list)  # in kernels
        self._read_alone = set[int]()  # by operations outside of kernels
        self._joined = dict[int, int]()  # by operation: another one of its kernel, until the first
        self._stored = set(self._bytes)  # in memory
        self._sources = dict[int, frozenset[int]]()  # of what is not: values in memory from which it is computed
        self._join()
        self._store()

    # ---- grouping ----

    def _join(self) -> None:
        """Joins operations into kernels, and finds what is in memory in any case."""
        level, runs, first = dict.fromkeys(self._stored, 0), dict[int, tuple[int, int]](), dict[tuple[int, int], int]()
        for op in self._ops:
            if op.name in _RENAMES:
                self._rename(op, level)
                continue
            operands = list(self._values(op))
            at = max((level[v] for v in operands), default=0)
            made = [v.id for v in op.outputs]
            self._bytes |= {v.id: v.bytes for v in op.outputs}
            is_fused = _is_fused(op)
            ends = not is_fused or (_is_reduction(op) and not _is_along_rows(op))
            level |= dict.fromkeys(made, at + ends)
            self._stored.update(made if ends else (), () if is_fused else operands)
            if not is_fused:
                self._read_alone.update(operands if op.name != "return" else ())
                continue
            self._maker |= dict.fromkeys(made, op)
            for v in operands:
                self._readers[v].append(op)
            whole = [x for x in op.inputs[op.name in SLICES_OPERAND :] if isinstance(x, Value)]
            run = runs[op.id] = at, max(prod(x.shape) for x in (*whole, *op.outputs))
            self._joined[op.id] = op.id
            for x in whole:
                if prod(x.shape) == run[1]:
                    v = self._named(x)
                    near = [first.setdefault((v, at), op.id), *([self._maker[v].id] if v in self._maker else ())]
                    for other in near:
                        if runs[other] == run:
                            self._joined[self._kernel(op.id)] = self._kernel(other)

    def _rename(self, op: Op, level: dict[int, int]) -> None:
        for x, v in zip(op.inputs, op.outputs, strict=True):
            if isinstance(x, Value):
                self._viewed[v.id] = self._named(x)
            else:
                self._stored.add(v.id)
                level[v.id], self._bytes[v.id] = 0, 0

    def _named(self, x: Value) -> int:
        return self._viewed.get(x.id, x.id)

    def _values(self, op: Op) -> Iterator[int]:
        return (self._named(x) for x in op.inputs if isinstance(x, Value))

    def _kernel(self, op: int) -> int:
        while (other := self._joined[op]) != op:
            self._joined[op] = op = self._joined[other]
        return op

    # ---- values that other kernels read ----

    def _store(self) -> None:
        """Chooses, in order of definition, what is written for other kernels, and what each of them computes again."""
        read = defaultdict[int, set[int]](set)  # by kernel, in any case
        for v in self._stored & self._readers.keys():
            for op in self._readers[v]:
                read[self._kernel(op.id)].add(v)
        for v, op in self._maker.items():
            if v in self._stored:
                continue
            sources = frozenset[int]().union(*map(self._behind, self._values(op)))
            others = {self._kernel(reader.id) for reader in self._readers[v]} - {self._kernel(op.id)}
            again = sum(self._bytes[s] for other in others for s in sources - read[other])
            dear = others and (_is_reduction(op) or again >= self._bytes[v] * (1 + len(others)))
            if dear or len(sources) > _MOST_SOURCES:
                self._stored.add(v)
            else:
                self._sources[v] = sources

    def _behind(self, v: int) -> frozenset[int]:
        return frozenset((v,)) if v in self._stored else self._sources[v]

    # ---- counting ----

    def moved(self) -> dict[int, Moved]:
        """Returns what every operation moves, by its id."""
        copies, found = self._copies(), dict[int, Moved]()
        read, started = defaultdict[int, set[int]](set), set[int]()
        writing = {self._kernel(self._maker[v].id) for v in self._stored & self._maker.keys()}
        for op in self._ops:
            count = len(op.inputs) + len(op.outputs)
            kernel = self._kernel(op.id) if op.id in self._joined else None
            if kernel in writing:
                accesses = self._fused(op, read[kernel])
                starts = int(any(accesses) and kernel not in started)
                started.update((kernel,) * starts)
            elif kernel is not None or op.name in _MOVES_NOTHING or op.bodies:  # others compute again what it computes
                accesses, starts = (0,) * count, 0
            else:
                reads = [int(isinstance(x, Value)) for x in op.inputs]
                accesses = accesses_alone(op, reads, [1] * len(op.outputs))
                starts = int(any(accesses))
            ports = copies.get(op.id, {})
            copied = tuple(ports.get(i, 0) for i in range(count)) if ports else ()
            found[op.id] = Moved(accesses, copied, starts + sum(times > 1 for times in ports.values()))
        return found

    def _fused(self, op: Op, read: set[int]) -> tuple[float, ...]:
        """Returns the accesses of an operation in a kernel.

        Args:
          read: what the kernel has read before.
        """
        reads, part = [], 0.0
        for i, x in enumerate(op.inputs):
            missing = frozenset[int]()
            if isinstance(x, Value) and not self._is_made_with(op, self._named(x)):
                missing = self._behind(self._named(x))
            sliced = op.name in SLICES_OPERAND and i == 0
            size = sum(self._bytes[v] for v in (missing if sliced else missing - read))
            if sliced:  # as large a part is read of all from which it is computed
                part, size = size / max(1, x.bytes if isinstance(x, Value) else 1), 0
            else:
                read |= missing
            reads.append(size / max(1, x.bytes) if isinstance(x, Value) else 0.0)
        writes = [float(v.id in self._stored) for v in op.outputs]
        return (*reads, writes[0] + part, *writes[1:])

    def _is_made_with(self, op: Op, v: int) -> bool:
        return v in self._maker and self._kernel(self._maker[v].id) == self._kernel(op.id)

    def _copies(self) -> dict[int, dict[int, int]]:
        """Returns how often slices of a loop's stacks are read and written beside its operations, by their ports."""
        found = defaultdict[int, dict[int, int]](dict)
        if self._block.owner is None or self._block.owner[0].name != "scan":
            return found
        ports = list(loop_ports(self._block.owner[0]))
        slices = {self._block.inputs[i].id for port in ports if port.role is PortRole.SLICE for _, i in port.inputs}
        stacks = [self._ops[-1].inputs[j] for port in ports if port.role is PortRole.STACK for _, j in port.outputs]
        for op in self._ops:
            if op.id in self._joined or op.name in (*_MOVES_NOTHING, *READS_PART_OF_OPERAND):
                continue
            for i, x in enumerate(op.inputs):
                if isinstance(x, Value) and self._named(x) in slices:
                    slices.remove(self._named(x))
                    found[op.id][i] = 2
        ends = {v.id: (op, len(op.inputs) + k) for op in self._ops for k, v in enumerate(op.outputs)}
        for v in {self._named(x) for x in stacks if isinstance(x, Value)} & ends.keys():
            op, port = ends[v]
            kept = op.id not in self._joined or v in self._read_alone
            kept = kept or any(not self._is_made_with(reader, v) for reader in self._readers[v])
            found[op.id][port] = 3 if kept else 1  # zeros, and a copy of what is in memory by itself
        return found


def _is_fused(op: Op) -> bool:
    """Whether an operation is part of a kernel with others."""
    if op.bodies or op.name in (*TRANSFERS, *_MOVES_NOTHING):
        return False
    return op.name in _FUSED_TOO or not ends_fusion(op.name) or _is_reduction(op)


def _is_reduction(op: Op) -> bool:
    return op.name.startswith("reduce_") and "axes" in op.params and op.name in RULES


def _is_along_rows(op: Op) -> bool:
    """Whether a reduction is along the last dims of its operand, but not all."""
    axes, rank = op.params["axes"], len(op.inputs[0].shape)
    return 0 < len(axes) < rank and sorted(axes) == list(range(rank - len(axes), rank))
