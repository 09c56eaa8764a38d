"""Plan files: JSON with everything needed to read a plan again and to run it.

Layouts and rows of rules are written once, in tables; operations, values and uses refer to
them by position. Every entry stands on a line of its own, so that ``git diff`` shows what
changed. Nothing in it depends on the time, the machine or the folder.
"""

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from meshdsl.errors import NotationError, PlanFileError, faults
from meshdsl.layouts.exchange import Exchange
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.move import Move
from meshdsl.layouts.notation import parse_placement
from meshdsl.layouts.placement import Placement
from meshdsl.layouts.rule import Row
from meshdsl.layouts.topology import Topology
from meshdsl.plan.value import Array, Collective, Plan
from meshdsl.planner.solution import Solution

VERSION = 1
FORMAT = "meshdsl plan"
T = TypeVar("T")


class Moved(msgspec.Struct, array_like=True, frozen=True):
    """A move of one value; layouts by position."""

    value: int
    kind: str
    axes: tuple[str, ...]
    source: str
    target: str
    before: int
    after: int
    bytes: int
    seconds: float


class Signature(msgspec.Struct, array_like=True, frozen=True):
    """A row of a rule."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    size: int = 0
    collectives: tuple[Exchange, ...] = ()


class PlanFile(msgspec.Struct, frozen=True):
    """The file, field by field."""

    format: str
    version: int
    name: str
    fingerprint: str
    mesh: dict[str, int]
    topology: Topology
    seconds: float
    lower_bound: float
    peak: int
    peak_op: int
    held: tuple[tuple[str, int], ...]
    held_values: tuple[tuple[int, int], ...]
    notes: tuple[str, ...]
    solver_notes: tuple[str, ...]
    operations: dict[str, int]
    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    collectives: tuple[Collective, ...]
    layouts: list[Layout]
    signatures: list[Signature]
    ops: list[tuple[int, tuple[int, ...]]]
    values: list[tuple[int, int]]
    uses: list[tuple[int, int, int]]
    moves: list[Moved]
    padded: tuple[tuple[int, int], ...] = ()


class _Head(msgspec.Struct):
    """What every version of the file begins with."""

    format: str
    version: int


class _Table(dict[T, int]):
    """Things by the position at which they were first asked for."""

    def __missing__(self, thing: T) -> int:
        self[thing] = len(self)
        return self[thing]


def plan_bytes(plan: Plan) -> bytes:
    """The file of a plan."""
    record = _record(plan)
    fields = (f'"{name}":{_lines(getattr(record, name))}' for name in record.__struct_fields__)
    return ("{" + ",\n".join(fields) + "}\n").encode()


def load_plan(path: str | Path) -> Plan:
    """The plan in a file; PlanFileError if there is none, or one of another version."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise PlanFileError(f"cannot read the plan file {str(path)!r}: {error.strerror}") from error
    _check_head(str(path), data)
    try:
        return _plan(msgspec.json.decode(data, type=PlanFile, dec_hook=_decode))
    except (msgspec.DecodeError, NotationError, IndexError) as error:
        raise PlanFileError(f"{str(path)!r} is a damaged plan file: {error}") from error


def _check_head(path: str, data: bytes) -> None:
    try:
        head = msgspec.json.decode(data, type=_Head)
    except msgspec.DecodeError as error:
        raise PlanFileError(f"{path!r} is no plan file: {error}\nplan.save(path) writes one") from error
    if head.format != FORMAT:
        raise PlanFileError(f"{path!r} is no plan file: its format is {head.format!r}\nplan.save(path) writes one")
    if head.version != VERSION:
        rows = [f"version: {head.version} in the file, {VERSION} in this meshdsl"]
        raise PlanFileError(faults(f"{path!r} is a plan file of another version:", rows, "plan again and save it"))


def _record(plan: Plan) -> PlanFile:
    s = plan.solution
    layouts: _Table[Layout] = _Table()
    signatures: _Table[Row] = _Table()
    ops = [(op, tuple(signatures[row] for row in rows)) for op, rows in sorted(s.rows.items())]
    values = [(value, layouts[layout]) for value, layout in sorted(s.layouts.items())]
    uses = [(op, i, layouts[layout]) for (op, i), layout in sorted(s.uses.items())]
    moves = [_moved(value, move, layouts) for value, tree in sorted(s.trees.items()) for move in tree]
    return PlanFile(
        format=FORMAT,
        version=VERSION,
        name=plan.name,
        fingerprint=plan.fingerprint,
        mesh=dict(plan.mesh),
        topology=plan.topology,
        seconds=s.seconds,
        lower_bound=s.lower_bound,
        peak=s.peak,
        peak_op=s.peak_op,
        held=plan.held,
        held_values=s.held,
        notes=plan.notes,
        solver_notes=s.notes,
        operations=dict(plan.operations),
        inputs=plan.inputs,
        outputs=plan.outputs,
        collectives=plan.collectives,
        layouts=list(layouts),
        signatures=[Signature(_texts(r.inputs), _texts(r.outputs), r.size, r.collectives) for r in signatures],
        ops=ops,
        values=values,
        uses=uses,
        moves=moves,
        padded=plan.padded,
    )


def _moved(value: int, m: Move, layouts: _Table[Layout]) -> Moved:
    ends = (str(m.source), str(m.target), layouts[m.before], layouts[m.after])
    return Moved(value, m.kind, m.axes, *ends, m.bytes, m.seconds)


def _plan(f: PlanFile) -> Plan:
    arrays = f.inputs, f.outputs, f.collectives, f.held
    return Plan(f.name, f.fingerprint, f.operations, *arrays, f.notes, _solution(f), f.padded)


def _solution(f: PlanFile) -> Solution:
    rows = [Row(_placements(s.inputs), _placements(s.outputs), s.size, s.collectives) for s in f.signatures]
    trees: dict[int, list[Move]] = {}
    for m in f.moves:
        ends = (parse_placement(m.source), parse_placement(m.target), f.layouts[m.before], f.layouts[m.after])
        trees.setdefault(m.value, []).append(Move(m.kind, m.axes, *ends, m.bytes, m.seconds))
    return Solution(
        mesh=Mesh(topology=f.topology, **f.mesh),
        rows={op: tuple(rows[i] for i in picked) for op, picked in f.ops},
        layouts={value: f.layouts[i] for value, i in f.values},
        uses={(op, i): f.layouts[at] for op, i, at in f.uses},
        trees={value: tuple(tree) for value, tree in trees.items()},
        seconds=f.seconds,
        lower_bound=f.lower_bound,
        peak=f.peak,
        peak_op=f.peak_op,
        held=f.held_values,
        notes=f.solver_notes,
    )


def _lines(value: Any) -> str:
    """JSON with one line per entry of a list."""
    if isinstance(value, (list, tuple)) and value:
        return "[\n" + ",\n".join(_json(entry) for entry in value) + "\n]"
    return _json(value)


def _json(value: Any) -> str:
    return msgspec.json.encode(value, enc_hook=str).decode()


def _decode(kind: type, value: Any) -> Any:
    return Layout.parse(value)


def _texts(placements: tuple[Placement, ...]) -> tuple[str, ...]:
    return tuple(map(str, placements))


def _placements(texts: tuple[str, ...]) -> tuple[Placement, ...]:
    return tuple(map(parse_placement, texts))
