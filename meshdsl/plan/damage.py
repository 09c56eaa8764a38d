"""What is wrong inside a plan file, entry by entry, as far as it can be seen without the program.

    layouts[2] 'dta=S(1) model=B': no axis 'dta' in the mesh; did you mean 'data'?
    moves[0]: starts at data=S(0) model=B, but value 4 lies as data=S(1) model=B
    collectives: none for moves[3], all-gather over data of 384 bytes

A plan is moved between branches, merged and edited; what runs, and what it says, has to be one
plan. Whether it is a plan of the program at hand is another question (see ``match`` and ``sound``).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from meshdsl.errors import MeshDSLError, first_line, nearest
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.move import arcs, fits
from meshdsl.layouts.notation import parse_placement
from meshdsl.layouts.placement import Placement, Split
from meshdsl.layouts.price import COLLECTIVES
from meshdsl.plan.record import Moved, PlanFile
from meshdsl.plan.value import Array

Sent = tuple[str, tuple[str, ...], int]  # kind, axes and bytes of a collective


def damage(f: PlanFile) -> list[str]:
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


def _is_move(m: Moved, before: Layout, after: Layout, mesh: Mesh) -> bool:
    splits = (p.dim for layout in (before, after) for _, p in layout.placements if isinstance(p, Split))
    rank = 1 + max((dim for dim in splits if isinstance(dim, int)), default=-1)
    ends = (m.kind, m.axes, parse_placement(m.source), parse_placement(m.target), after)
    return any((a.kind, a.axes, a.source, a.target, a.after) == ends for a in arcs(before, rank, mesh))


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
