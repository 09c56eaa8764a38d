"""What is wrong inside a plan file, entry by entry, as far as it can be seen without the program.

    layouts[2] 'dta=S(1) model=B': no axis 'dta' in the mesh; did you mean 'data'?
    moves[0]: starts at data=S(0) model=B, but value 4 lies as data=S(1) model=B
    collectives: none for moves[3], all-gather over data of 384 bytes

A plan is moved between branches, merged and edited; what runs, and what it says, has to be one
plan. Whether it is a plan of the program at hand is another question (see ``match`` and ``sound``).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from os import PathLike, getpid
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from meshdsl.errors import MeshDSLError, NotationError, PlanFileError, faults, first_line, is_a, nearest, shortened
from meshdsl.ir.solution import Solution
from meshdsl.layouts.collective_cost import COLLECTIVES
from meshdsl.layouts.exchange import Exchange
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.notation import parse_placement
from meshdsl.layouts.placement import Placement, Split
from meshdsl.layouts.reshard import ReshardStep, fits, reshard_edges
from meshdsl.layouts.sharding_rule import Signature
from meshdsl.layouts.topology import Topology
from meshdsl.plan.types import Array, Collective, Line, PlanData, Span, Timing
from meshdsl.schedules.pipelined import Pipelined
from meshdsl.util.lazy import Lazy

# ---- Record ----------------------------------------------------------------------------------------------------------
# What a plan file holds, field by field.
#
# Layouts and rows of rules are written once, in tables; operations, values and uses refer to
# them by position. The last field seals the others: a number that was changed by hand is no
# longer what the planner predicted, and nothing else in the file could tell.


VERSION = 1
FORMAT = "meshdsl plan"
Seals = tuple[tuple[str, str], ...]


class MoveRecord(msgspec.Struct, array_like=True, frozen=True):
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


class SignatureRecord(msgspec.Struct, array_like=True, frozen=True):
    """A row of a rule."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    size: int = 0
    collectives: tuple[Exchange, ...] = ()


class PlanFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file.

    Args:
      ops: (op id, a signature per mesh axis).
      values: (value id, its own layout).
      uses: (op id, operand, the layout it is read in).
    """

    format: str
    version: int
    name: str
    fingerprint: str
    mesh: dict[str, int]
    topology: Topology
    seconds: float
    lower_bound: float
    simulated_seconds: float
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
    lines: tuple[Line, ...]
    spans: tuple[Span, ...]
    layouts: list[Layout]
    signatures: list[SignatureRecord]
    ops: list[tuple[int, tuple[int, ...]]]
    values: list[tuple[int, int]]
    uses: list[tuple[int, int, int]]
    moves: list[MoveRecord]
    padded: tuple[tuple[int, int], ...]
    seals: Seals
    pipeline: Pipelined | None = None


class PlanFileHead(msgspec.Struct):
    """What every version of the file begins with."""

    format: str
    version: int


def seals_of(fields: Mapping[str, Any]) -> Seals:
    """Per field, the beginning of the SHA-256 of its JSON."""
    return tuple((name, sha256(as_json(fields[name])).hexdigest()[:16]) for name in fields if name != "seals")


def broken_seals(fields: Mapping[str, Any]) -> Iterator[str]:
    """A row per field of a file that is not as it was saved."""
    sealed = dict(fields["seals"])
    for name, seal in seals_of(fields):
        if sealed.get(name) != seal:
            yield f"{name}: not as it was saved"


def as_json(value: Any) -> bytes:
    """JSON without spaces, layouts and placements as text."""
    return msgspec.json.encode(value, enc_hook=_as_text)


def _as_text(value: Any) -> str:
    """Of what JSON has no form for, only these are written as text; a number of another library would be damage."""
    if isinstance(value, Layout | Placement):
        return str(value)
    raise TypeError(f"a plan file holds no {type(value).__name__}: {value!r}")


# ---- Damage ----------------------------------------------------------------------------------------------------------


Sent = tuple[str, tuple[str, ...], int]  # kind, axes and bytes of a collective


def file_faults(f: PlanFile) -> list[str]:
    """A row per entry that is wrong; tables first, as all else refers to them."""
    for stage in (_tables, _positions, _content):
        rows = list(stage(f))
        if rows:
            return rows
    return []


def mesh_of(f: PlanFile) -> Mesh:
    """The mesh of the plan; NotationError if there is none of these axes."""
    return Mesh.parse(",".join(f"{name}={size}" for name, size in f.mesh.items()), f.topology)


def _tables(f: PlanFile) -> Iterator[str]:
    try:
        mesh = mesh_of(f)
    except MeshDSLError as error:
        yield f"mesh: {first_line(error)}"
        return
    for i, layout in enumerate(f.layouts):
        yield from (f"layouts[{i}] '{layout}': {text}" for text in _axis_faults(layout, mesh))
    for name, arrays in (("inputs", f.inputs), ("outputs", f.outputs)):
        for i, array in enumerate(arrays):
            yield from (f"{_array(name, i, array)}: {text}" for text in _array_faults(array, mesh))
    for i, signature in enumerate(f.signatures):
        yield from _unreadable(f"signatures[{i}]", (*signature.inputs, *signature.outputs))
    for i, move in enumerate(f.moves):
        yield from _unreadable(f"moves[{i}]", (move.source, move.target))


def _axis_faults(layout: Layout, mesh: Mesh) -> Iterator[str]:
    for axis in layout.axes:
        if axis not in mesh.names:
            yield f"no axis {axis!r} in the mesh{nearest(axis, mesh.names)}"
        elif isinstance(at := layout.on(axis), Split) and isinstance(at.dim, str):
            yield f"{axis}={at} names a dim; a plan numbers them"
    missing = [axis for axis in mesh.names if axis not in layout.axes]
    if missing:
        yield f"nothing is said of axis {', '.join(missing)}"


def _array(name: str, i: int, array: Array) -> str:
    return f"{name}[{i}] {array.path}".rstrip()


def _array_faults(array: Array, mesh: Mesh) -> Iterator[str]:
    found = list(_axis_faults(array.layout, mesh))
    yield from found
    beyond = [p.dim for _, p in array.layout.placements if isinstance(p, Split) and p is not _within(p, array.shape)]
    if beyond and not found:
        yield f"{array.layout} splits dim {beyond[0]} of {array.type}"
    elif not found and not fits(array.layout, array.shape, mesh):
        yield f"{array.layout} does not divide {array.type} on mesh {mesh}"


def _within(p: Split, shape: Sequence[int]) -> Split | None:
    return p if isinstance(p.dim, int) and p.dim < len(shape) else None


def _unreadable(entry: str, texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        try:
            parse_placement(text)
        except MeshDSLError as error:
            yield f"{entry}: {first_line(error)}"


def _positions(f: PlanFile) -> Iterator[str]:
    """Entries that refer to a layout, signature or value that is not there, or that are there twice."""
    layouts, known = len(f.layouts), {value for value, _ in f.values}
    for i, (_, rows) in enumerate(f.ops):
        yield from (_absent("ops", i, "signature", row) for row in rows if not 0 <= row < len(f.signatures))
        if len(rows) != len(f.mesh):
            yield f"ops[{i}]: {len(rows)} signatures for {len(f.mesh)} mesh axes"
    for i, (_, at) in enumerate(f.values):
        yield from _layout("values", i, at, layouts)
    for i, (_, _, at) in enumerate(f.uses):
        yield from _layout("uses", i, at, layouts)
    for i, move in enumerate(f.moves):
        yield from (row for at in (move.before, move.after) for row in _layout("moves", i, at, layouts))
        if move.value not in known:
            yield _absent("moves", i, "value", move.value)
    yield from (_absent("spans", i, "line", s.line) for i, s in enumerate(f.spans) if not 0 <= s.line < len(f.lines))
    yield from _twice("ops", "operation", [op for op, _ in f.ops])
    yield from _twice("values", "value", [value for value, _ in f.values])
    yield from _twice("uses", "operand", [(op, operand) for op, operand, _ in f.uses])


def _absent(table: str, i: int, noun: str, number: int) -> str:
    return f"{table}[{i}]: there is no {noun} {number}"


def _layout(table: str, i: int, at: int, count: int) -> Iterator[str]:
    if not 0 <= at < count:
        yield f"{_absent(table, i, 'layout', at)}; they go from 0 to {count - 1}"


def _twice(table: str, noun: str, ids: Sequence[object]) -> Iterator[str]:
    first: dict[object, int] = {}
    for i, one in enumerate(ids):
        if first.setdefault(one, i) != i:
            yield f"{table}[{i}]: {noun} {one} is there already, as {table}[{first[one]}]"


def _content(f: PlanFile) -> Iterator[str]:
    mesh = mesh_of(f)
    for check in _CHECKS:
        yield from check(f, mesh)


def _boundary(f: PlanFile, mesh: Mesh) -> Iterator[str]:
    """Inputs are the first values; outputs lie as the inputs they replace."""
    own = {value: f.layouts[at] for value, at in f.values}
    paths = {array.path: array.layout for array in f.inputs}
    for i, array in enumerate(f.inputs):
        if own.get(i) != array.layout:
            yield f"{_array('inputs', i, array)}: {array.layout}, but as value {i} it lies as {own.get(i)}"
    for i, array in enumerate(f.outputs):
        if array.follows and paths.get(array.follows) != array.layout:
            there = paths.get(array.follows, "no input")
            yield f"{_array('outputs', i, array)}: {array.layout}, but {array.follows}, which it replaces, is {there}"


def _readings(f: PlanFile, mesh: Mesh) -> Iterator[str]:
    """Every operation reads its operands as its signatures say."""
    rows = {op: [f.signatures[i] for i in found] for op, found in f.ops}
    for i, (op, operand, at) in enumerate(f.uses):
        for axis, row in zip(mesh.names, rows.get(op, ()), strict=False):
            read = f.layouts[at].on(axis)
            said = _operand(row.inputs, operand)
            if said is not read:
                yield f"uses[{i}]: operation {op} reads operand {operand} as {axis}={read}, its signature says {said}"


def _operand(inputs: Sequence[str], operand: int) -> Placement | None:
    return parse_placement(inputs[operand]) if 0 <= operand < len(inputs) else None


def _moves(f: PlanFile, mesh: Mesh) -> Iterator[str]:
    """Every move is one of the table of moves and starts where the value lies by then."""
    lies = {value: [f.layouts[at]] for value, at in f.values}
    for i, m in enumerate(f.moves):
        before, after = f.layouts[m.before], f.layouts[m.after]
        if before not in lies[m.value]:
            there = " and ".join(map(str, lies[m.value]))
            yield f"moves[{i}]: starts at {before}, but value {m.value} lies as {there}"
        elif not _is_move(m, before, after, mesh):
            yield f"moves[{i}]: no {m.kind} over {','.join(m.axes)} leads from {before} to {after}"
        lies[m.value].append(after)


def _is_move(m: MoveRecord, before: Layout, after: Layout, mesh: Mesh) -> bool:
    splits = (p.dim for layout in (before, after) for _, p in layout.placements if isinstance(p, Split))
    rank = 1 + max((dim for dim in splits if isinstance(dim, int)), default=-1)
    ends = (m.kind, m.axes, parse_placement(m.source), parse_placement(m.target), after)
    return any((a.kind, a.axes, a.source, a.target, a.after) == ends for a in reshard_edges(before, rank, mesh))


def _collectives(f: PlanFile, mesh: Mesh) -> Iterator[str]:
    """A collective is listed for every move that is one, and no other but those inside local programs."""
    listed: dict[Sent, list[int]] = {}
    for i, c in enumerate(f.collectives):
        listed.setdefault((c.kind, c.axes, c.bytes), []).append(i)
    for i, m in enumerate(f.moves):
        if m.kind in COLLECTIVES:
            sent = (m.kind, m.axes, m.bytes)
            if listed.get(sent):
                listed[sent].pop()
            else:
                yield f"collectives: none for moves[{i}], {_sent(sent)}"
    if not any(signature.collectives for signature in f.signatures):
        left = ((i, sent) for sent, found in listed.items() for i in found)
        yield from (f"collectives[{i}]: no move of the plan is {_sent(sent)}" for i, sent in left)


def _spans(f: PlanFile, mesh: Mesh) -> Iterator[str]:
    """Every collective has a line and is waited for once."""
    known = {line.source for line in f.lines}
    lost = ((i, c.source) for i, c in enumerate(f.collectives) if c.source not in known)
    yield from (f"collectives[{i}]: there is no line {source!r}" for i, source in lost)
    waited = sum(span.collectives for span in f.spans)
    if waited != len(f.collectives):
        yield f"spans: they wait for {waited} collectives, of {len(f.collectives)}"


def _sent(sent: Sent) -> str:
    kind, axes, size = sent
    return f"{kind} over {','.join(axes)} of {size} bytes"


_CHECKS: tuple[Callable[[PlanFile, Mesh], Iterator[str]], ...] = (_boundary, _readings, _moves, _collectives, _spans)


# ---- File ------------------------------------------------------------------------------------------------------------
# Plan files: JSON with everything needed to read a plan again and to run it.
#
# Every entry stands on a line of its own, so that ``git diff`` shows what changed. Nothing in it
# depends on the time, the machine or the folder. A file is read whole or not at all: one that
# was cut off, merged or edited is an error that names the entries.


_REMEDY = "take the file as it was saved, or plan again and save that"
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, MeshDSLError)
T = TypeVar("T")


class _LayoutTable(dict[T, int]):
    """Things by the position at which they were first asked for."""

    def __missing__(self, thing: T) -> int:
        self[thing] = len(self)
        return self[thing]


def plan_bytes(plan: PlanData) -> bytes:
    """The file of a plan."""
    fields = msgspec.structs.asdict(_record(plan))
    lines = (f'"{name}":{_lines(value)}' for name, value in {**fields, "seals": seals_of(fields)}.items())
    return ("{" + ",\n".join(lines) + "}\n").encode()


def save_plan(plan: PlanData, path: str | PathLike[str]) -> None:
    """Write a plan to a file, all of it or nothing; PlanFileError if that cannot be."""
    file = _path(path)
    begun = file.with_name(f"{file.name}.{getpid()}.part")
    try:
        begun.write_bytes(plan_bytes(plan))
        begun.replace(file)
    except OSError as error:
        begun.unlink(missing_ok=True)
        raise PlanFileError(f"cannot write the plan file {str(file)!r}: {error.strerror}") from error


def read_plan(path: str | PathLike[str]) -> PlanData:
    """The plan in a file; PlanFileError if there is none, one of another version, or one that was damaged."""
    file = _path(path)
    try:
        data = file.read_bytes()
    except OSError as error:
        raise PlanFileError(f"cannot read the plan file {str(file)!r}: {error.strerror}") from error
    _check_head(str(file), data)
    try:
        record = msgspec.json.decode(data, type=PlanFile, dec_hook=_decode)
        rows = [*broken_seals(msgspec.json.decode(data)), *file_faults(record)]
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
        head = msgspec.json.decode(data, type=PlanFileHead)
    except _UNREADABLE as error:
        raise PlanFileError(f"{path!r} is no plan file: {error}\nplan.save(path) writes one") from error
    if head.format != FORMAT:
        raise PlanFileError(f"{path!r} is no plan file: its format is {head.format!r}\nplan.save(path) writes one")
    if head.version != VERSION:
        rows = [f"version: {head.version} in the file, {VERSION} in this meshdsl"]
        raise PlanFileError(faults(f"{path!r} is a plan file of another version:", rows, "plan again and save it"))


def _record(plan: PlanData) -> PlanFile:
    """What the file says, before it is sealed."""
    s = plan.solution
    layouts: _LayoutTable[Layout] = _LayoutTable()
    signatures: _LayoutTable[Signature] = _LayoutTable()
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


def _moved(value: int, m: ReshardStep, layouts: _LayoutTable[Layout]) -> MoveRecord:
    ends = (str(m.source), str(m.target), layouts[m.before], layouts[m.after])
    return MoveRecord(value, m.kind, m.axes, *ends, m.bytes, m.seconds)


def _plan(f: PlanFile) -> PlanData:
    arrays = f.inputs, f.outputs, f.collectives, f.held
    more = f.padded, f.pipeline, f.lines, Lazy.known(Timing(f.spans, f.simulated_seconds))
    return PlanData(f.name, Lazy.known(f.fingerprint), f.operations, *arrays, f.notes, _solution(f), *more)


def _solution(f: PlanFile) -> Solution:
    rows = [Signature(_placements(s.inputs), _placements(s.outputs), s.size, s.collectives) for s in f.signatures]
    trees: dict[int, list[ReshardStep]] = {}
    for m in f.moves:
        ends = (parse_placement(m.source), parse_placement(m.target), f.layouts[m.before], f.layouts[m.after])
        trees.setdefault(m.value, []).append(ReshardStep(m.kind, m.axes, *ends, m.bytes, m.seconds))
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
