"""In which memory a value can be made: what is true of a program under all of its layouts.

    runs     an operation fused into its readers runs with the last of them, and what it reads must be there until then
    views    a reshape is its operand under another shape, and takes no memory
    reuses   an elementwise result may be written over an operand that nobody reads afterwards, through fused ones
             too; an update over what it updates; the result of a loop over what the loop starts from
    slices   what a loop reads of a stack in each trip is a copy where it is not fused

These are the rules of XLA's buffer assignment (``CanShareOperandBufferWithUser``, ``HloAliasAnalysis``).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from meshdsl.ir import LOOPS, Graph, Op, Value
from meshdsl.planner.arrays import array, stretches
from meshdsl.planner.costs import VIEWS, is_heavy, written
from meshdsl.planner.exact import Ids
from meshdsl.planner.narrow import Reads, picks, reads
from meshdsl.planner.numbering import Flags, Numbering, numbering_of
from meshdsl.rules.elementwise import elementwise
from meshdsl.rules.registry import RULES
from meshdsl.trace.graphs import carried_of, carried_operands

_SAME = VIEWS | {"constrain", "optimization_barrier"}
_UPDATES = ("dynamic_update_slice", "scatter")


class Reuses(NamedTuple):
    """Results that may be written over operands, in the order of positions.

    Args:
      at: their positions. made: the values.
      options: per result, and one past the last, the first of the readings (``over``) that it may be written over.
    """

    at: Ids
    made: Ids
    options: Ids
    over: Ids


@dataclass(frozen=True)
class Body:
    """How the values of a body lie in the memory of the operation around it.

    Args:
      carried: (input, position among what is returned) that are one place.
      given: positions of what is returned straight into the results of the operation.
      sliced: inputs that are slices of a stack, and are copies.
    """

    carried: tuple[tuple[int, int], ...] = ()
    given: tuple[int, ...] = ()
    sliced: frozenset[int] = frozenset()


class Places:
    """The facts of a program; positions, values and readings go by their numbers.

    Args:
      backend: XLA's, which compiles for the devices (see ``Topology``).
      kept: the values that are written to memory.
      reads: how float32 is read, if that decides how it is kept.
      runs: per position, the one at which its operation runs.
      views: positions of operations whose result is their operand.
      reuses: what may be written over what.
      lies: per part of the program, how its values lie in the memory around it.
    """

    def __init__(self, graph: Graph, backend: str) -> None:
        from meshdsl.planner.fused import run_at  # with its compiler, too much to import for those who plan nothing

        tpu = backend == "tpu"
        self.numbers = numbers = numbering_of(graph)
        kept = written(graph, again=tpu)
        self.kept = kept & ~numbers.flags(picks(graph)) if tpu else kept
        self.reads = reads(graph) if tpu else Reads()
        self.runs: Ids = run_at(numbers, self.kept)
        self.views = _views(numbers)
        self.reuses = _reuses(numbers, self.kept)
        whole = Body(sliced=frozenset(range(len(graph.inputs))))
        self.lies = [_body(*part.around) if part.around else whole for part in numbers.parts]


_KNOWN: WeakKeyDictionary[Graph, dict[str, Places]] = WeakKeyDictionary()


def places_of(graph: Graph, backend: str) -> Places:
    """The facts of a program, worked out once for a backend."""
    known = _KNOWN.setdefault(graph, {})
    if backend not in known:
        known[backend] = Places(graph, backend)
    return known[backend]


def _views(numbers: Numbering) -> Ids:
    maybe = np.flatnonzero(numbers.named((*_SAME, "transpose"))).tolist()
    return array(at for at in maybe if (op := numbers.ops[at]) and _is_view(op))


def _is_view(op: Op) -> bool:
    """Whether the result is the operand, at most under another shape."""
    if op.name == "transpose":  # of dims of length 1
        order = [d for d in op.params["permutation"] if op.inputs[0].shape[d] > 1]
        return order == sorted(order)
    return op.name in _SAME


def _reuses(numbers: Numbering, kept: Flags) -> Reuses:
    """What may be written over what: by elementwise operations, through fused ones too, and by updates and loops."""
    from meshdsl.planner.fused import written_over  # with its compiler, as above

    names = set(numbers.names)
    by_element = numbers.named(name for name in names if RULES.get(name) is elementwise)
    found, options = written_over(numbers, by_element, kept)
    updates = numbers.named(name for name in names if name.startswith(_UPDATES))
    others = np.flatnonzero(updates | numbers.named(LOOPS)).tolist()
    more = array(x for at in others if (op := numbers.ops[at]) for pair in _written_over(op) for x in (at, *pair))
    at, results, operands = more.reshape(-1, 3).T
    over = numbers.reading_at(at, operands)
    there = np.flatnonzero(over >= 0)
    begins = options.size + np.arange(there.size)
    rows = np.stack([at[there], numbers.makes[at[there]] + results[there], begins, begins + 1], axis=1)
    every = np.concatenate((found, rows))
    at, made, begins, ends = every[np.argsort(every[:, 0], kind="stable")].T
    options = np.append(options, over[there])[stretches(begins, ends - begins)]
    return Reuses(at, made, np.cumsum([0, *(ends - begins)]), options)


def _written_over(op: Op) -> Iterator[tuple[int, int]]:
    """Results of an update or a loop, and the operand that each may be written over, by position."""
    if op.name.startswith(_UPDATES):
        yield 0, 0
    elif op.name in ("scan", "while"):
        carried = carried_operands(op)
        yield from ((i, at) for i, at in enumerate(carried) if _is_only_carried(op, carried, at))


def _is_only_carried(op: Op, carried: range, operand: int) -> bool:
    """Whether a carry starts from it, and the loop does not read it in every trip too."""
    x = op.inputs[operand]
    return not any(x is y for y in (*op.inputs[: carried.start], *op.inputs[carried.stop :]))


def _body(op: Op, which: int) -> Body:
    body = op.bodies[which]
    if op.name == "cond":
        return Body(given=tuple(range(len(body.returned))))
    if body is not op.bodies[-1]:  # the condition of a loop
        return Body()
    carried = carried_of(op)[-1]
    return Body(tuple((at, i) for i, at in enumerate(carried)), sliced=_sliced(body, carried.stop))


def _sliced(body: Graph, first: int) -> frozenset[int]:
    """Inputs from ``first`` on that something reads that is not fused."""
    heavy = [op for op in body.ops if op.bodies or (is_heavy(op.name) and not op.name.startswith("reduce_"))]
    read = {x.id for op in heavy for x in op.inputs if isinstance(x, Value)}
    return frozenset(i for i, v in enumerate(body.inputs) if i >= first and v.id in read)
