"""Plan files: JSON with everything needed to read a plan again and to run it.

Every entry stands on a line of its own, so that ``git diff`` shows what changed. Nothing in it
depends on the time, the machine or the folder. A file is read whole or not at all: one that
was cut off, merged or edited is an error that names the entries.
"""

from os import PathLike, getpid
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from meshdsl.errors import MeshDSLError, NotationError, PlanFileError, faults, first_line, is_a, shortened
from meshdsl.later import Later
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.move import Move
from meshdsl.layouts.notation import parse_placement
from meshdsl.layouts.placement import Placement
from meshdsl.layouts.rule import Signature
from meshdsl.plan.damage import damage, mesh_of
from meshdsl.plan.record import FORMAT, VERSION, Head, Moved, PlanFile, SignatureRecord, as_json, broken_seals, seals_of
from meshdsl.plan.timing import Timing
from meshdsl.plan.value import Plan
from meshdsl.planner.solution import Solution

_REMEDY = "take the file as it was saved, or plan again and save that"
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, MeshDSLError)
T = TypeVar("T")


class _Table(dict[T, int]):
    """Things by the position at which they were first asked for."""

    def __missing__(self, thing: T) -> int:
        self[thing] = len(self)
        return self[thing]


def plan_bytes(plan: Plan) -> bytes:
    """The file of a plan."""
    fields = msgspec.structs.asdict(_record(plan))
    lines = (f'"{name}":{_lines(value)}' for name, value in {**fields, "seals": seals_of(fields)}.items())
    return ("{" + ",\n".join(lines) + "}\n").encode()


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan to a file, all of it or nothing; PlanFileError if that cannot be."""
    file = _path(path)
    begun = file.with_name(f"{file.name}.{getpid()}.part")
    try:
        begun.write_bytes(plan_bytes(plan))
        begun.replace(file)
    except OSError as error:
        begun.unlink(missing_ok=True)
        raise PlanFileError(f"cannot write the plan file {str(file)!r}: {error.strerror}") from error


def load_plan(path: str | Path) -> Plan:
    """The plan in a file; PlanFileError if there is none, one of another version, or one that was damaged."""
    file = _path(path)
    try:
        data = file.read_bytes()
    except OSError as error:
        raise PlanFileError(f"cannot read the plan file {str(file)!r}: {error.strerror}") from error
    _check_head(str(file), data)
    try:
        record = msgspec.json.decode(data, type=PlanFile, dec_hook=_decode)
        rows = [*broken_seals(msgspec.json.decode(data)), *damage(record)]
    except _UNREADABLE as error:
        rows = [str(error)]
    if rows:
        raise PlanFileError(faults(f"{str(file)!r} is a damaged plan file:", shortened(rows), _REMEDY))
    return _plan(record)


def _path(path: object) -> Path:
    if not isinstance(path, str | PathLike):
        raise PlanFileError(f"{is_a(path)}, not the path of a plan file")
    return Path(path)


def _check_head(path: str, data: bytes) -> None:
    try:
        head = msgspec.json.decode(data, type=Head)
    except _UNREADABLE as error:
        raise PlanFileError(f"{path!r} is no plan file: {error}\nplan.save(path) writes one") from error
    if head.format != FORMAT:
        raise PlanFileError(f"{path!r} is no plan file: its format is {head.format!r}\nplan.save(path) writes one")
    if head.version != VERSION:
        rows = [f"version: {head.version} in the file, {VERSION} in this meshdsl"]
        raise PlanFileError(faults(f"{path!r} is a plan file of another version:", rows, "plan again and save it"))


def _record(plan: Plan) -> PlanFile:
    """What the file says, before it is sealed."""
    s = plan.solution
    layouts: _Table[Layout] = _Table()
    signatures: _Table[Signature] = _Table()
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
        simulated_seconds=plan.simulated_seconds,
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
        lines=plan.lines,
        spans=plan.spans,
        layouts=list(layouts),
        signatures=[SignatureRecord(_texts(r.inputs), _texts(r.outputs), r.size, r.collectives) for r in signatures],
        ops=ops,
        values=values,
        uses=uses,
        moves=moves,
        padded=plan.padded,
        pipeline=plan.pipeline,
        seals=(),
    )


def _moved(value: int, m: Move, layouts: _Table[Layout]) -> Moved:
    ends = (str(m.source), str(m.target), layouts[m.before], layouts[m.after])
    return Moved(value, m.kind, m.axes, *ends, m.bytes, m.seconds)


def _plan(f: PlanFile) -> Plan:
    arrays = f.inputs, f.outputs, f.collectives, f.held
    more = f.padded, f.pipeline, f.lines, Later.known(Timing(f.spans, f.simulated_seconds))
    return Plan(f.name, Later.known(f.fingerprint), f.operations, *arrays, f.notes, _solution(f), *more)


def _solution(f: PlanFile) -> Solution:
    rows = [Signature(_placements(s.inputs), _placements(s.outputs), s.size, s.collectives) for s in f.signatures]
    trees: dict[int, list[Move]] = {}
    for m in f.moves:
        ends = (parse_placement(m.source), parse_placement(m.target), f.layouts[m.before], f.layouts[m.after])
        trees.setdefault(m.value, []).append(Move(m.kind, m.axes, *ends, m.bytes, m.seconds))
    return Solution(
        mesh=mesh_of(f),
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
    return as_json(value).decode()


def _decode(kind: type, value: Any) -> Any:
    try:
        return Layout.of(value)
    except NotationError as error:  # msgspec adds the place to a ValueError
        raise ValueError(first_line(error)) from error


def _texts(placements: tuple[Placement, ...]) -> tuple[str, ...]:
    return tuple(map(str, placements))


def _placements(texts: tuple[str, ...]) -> tuple[Placement, ...]:
    return tuple(map(parse_placement, texts))
