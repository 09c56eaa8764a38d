"""Plan files: JSON with everything needed to read a plan again, to run it, and to see in review what changed.

    {"format":"meshdsl plan",
    "version":1,
    ...
    "moves":[
    [0,"all-gather",["data"],"S(1)","B",0,3,384,0.000151],
    ...

Every entry is on a line of its own, so that ``git diff`` shows what changed. The file depends on the plan alone, and on
the version of jax that traced the step, not on the time, the machine or the folder, and it names no Python module.
``PlanFile`` is the one definition of its fields.

A file is read completely or not at all. Plan files are moved between branches, merged and edited by hand, so reading
checks that the file still describes one plan, and reports every faulty entry:

    layouts[2] 'dta=S(1) model=B': no axis 'dta' in the mesh; did you mean 'data'?
    moves[0]: starts from data=S(0) model=B, but value 4 is available as data=S(1) model=B
    collectives: missing for moves[3], all-gather over data of 384 bytes

Whether it is a plan of the program at hand is another question, which ``meshdsl.plan.validate`` answers.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from hashlib import sha256
from os import PathLike, getpid
from pathlib import Path
from typing import Any, TypeVar

import jax.numpy as jnp
import msgspec

from meshdsl.errors import (
    MeshDSLError,
    NotationError,
    PlanFileError,
    faults,
    first_line,
    is_a,
    likely,
    nearest,
    shortened,
)
from meshdsl.ir.solution import Bucket, Prefetch, Ring, Solution
from meshdsl.layouts.collective_cost import COLLECTIVES
from meshdsl.layouts.exchange import Exchange
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.low_bits import FORMATS, LowBits
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.notation import parse_placement
from meshdsl.layouts.placement import Placement, Split
from meshdsl.layouts.reshard import ReshardStep, fits, reshard_edges
from meshdsl.layouts.sharding_rule import Signature
from meshdsl.layouts.topology import Topology, with_host_of_preset, without_host_of_preset, written_fields
from meshdsl.plan.types import (
    Array,
    Collective,
    HostMemory,
    Line,
    PlanData,
    PrefetchedLoop,
    Recomputation,
    Span,
    Timing,
    Utilization,
)
from meshdsl.planner.limits import EFFORTS, PROVE
from meshdsl.schedules.pipelined import Pipelined
from meshdsl.util.files import read_regular
from meshdsl.util.lazy import Lazy

VERSION = 1
FORMAT = "meshdsl plan"
MOST_BYTES = 1_000_000_000  # of a file
_SEAL_DIGITS = 16  # hexadecimal digits of the SHA-256 of a field that the file keeps
_REMEDY = "restore the file as it was saved, or plan again and save the new plan"
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, MeshDSLError)
Seals = tuple[tuple[str, str], ...]
T = TypeVar("T")


# ---- Format ----------------------------------------------------------------------------------------------------------


class SignatureRecord(msgspec.Struct, array_like=True, frozen=True):
    """A row of a sharding rule: the fields of ``Signature``."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    size: int = 0
    collectives: tuple[Exchange, ...] = ()


class StepRecord(msgspec.Struct, array_like=True, frozen=True):
    """A reshard step of one value: the fields of ``ReshardStep``, layouts by position in the table."""

    value: int
    kind: str
    axes: tuple[str, ...]
    source: Placement
    target: Placement
    before: int
    after: int
    bytes: int
    seconds: float


class BucketRecord(msgspec.Struct, array_like=True, frozen=True):
    """Reshard steps that are sent as one collective: the fields of ``Bucket``, its steps by position in ``moves``."""

    moves: tuple[int, ...]
    before: int
    bytes: int
    seconds: float
    workspace: int


class RingRecord(msgspec.Struct, array_like=True, frozen=True):
    """A reshard step whose hops are sent beside parts of products: its position in ``moves``, and operation ids."""

    move: int
    products: tuple[int, ...]


class PlanFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of the file, in their order.

    Most are attributes of ``PlanData`` under the same name, and ``OF_SOLUTION`` lists those of its ``Solution``. The
    other parts of a solution are tables, which write every layout and signature once and refer to it by position.

    Args:
      ops: (operation id, position of a signature for each mesh axis).
      values: (value id, position of the layout at its producer).
      uses: (operation id, operand index, position of the layout in which it is used).
      moves: reshard steps, in an order in which each starts from a layout that is available.
      prefetch: (operation id of a scan, inputs of its body sent ahead, results of its body sent behind).
      buckets: reshard steps that are sent as one.
      rings: reshard steps whose hops are sent beside parts of products.
      formats: per reshard step in fewer bits, its position in ``moves`` and the format.
      parts: per collective that is a bucket, its position and the collectives that are sent as this one.
      seals: per field, the beginning of its SHA-256: a number that was edited by hand is not what the planner
        predicted, and nothing else in the file could tell.
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
    moves: list[StepRecord]
    padded: tuple[tuple[int, int], ...]
    seals: Seals
    pipeline: Pipelined | None = None
    regions: bool = False
    utilization: Utilization = Utilization()
    jax: str = ""
    exposed: tuple[float, ...] = ()
    prefetched: tuple[PrefetchedLoop, ...] = ()
    prefetch: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...] = ()
    buckets: tuple[BucketRecord, ...] = ()
    parts: tuple[tuple[int, tuple[Collective, ...]], ...] = ()
    rings: tuple[RingRecord, ...] = ()
    recomputation: Recomputation | None = None
    checkpoints: bool = True
    effort: str = PROVE
    host: HostMemory | None = None
    compiled: str = ""
    low_bits: str = ""
    formats: tuple[tuple[int, str], ...] = ()
    alternatives: tuple[tuple[str, str], ...] = ()

    @property
    def planned_mesh(self) -> Mesh:
        """The mesh with its topology; NotationError if its axes are not those of a mesh."""
        sizes = ",".join(f"{name}={size}" for name, size in self.mesh.items())
        return Mesh.parse(sizes, with_host_of_preset(self.topology))


OF_SOLUTION = {  # fields of the file that are attributes of the solution, with the attribute
    "seconds": "seconds",
    "lower_bound": "lower_bound",
    "peak": "peak",
    "peak_op": "peak_op",
    "held_values": "held",
    "solver_notes": "notes",
}


class PlanFileHead(msgspec.Struct):
    """The beginning of the file, the same in every version."""

    format: str
    version: int


def as_json(value: Any) -> bytes:
    """JSON without spaces; layouts and placements are written as text."""
    return msgspec.json.encode(value, enc_hook=_as_text)


def _as_text(value: Any) -> str:
    """Only these types become text: writing a number of another library as text would damage the file."""
    if isinstance(value, Layout | Placement):
        return str(value)
    raise TypeError(f"a plan file cannot hold a {type(value).__name__}: {value!r}")


def _from_text(kind: type, value: Any) -> Any:
    try:
        if issubclass(kind, Layout):
            return Layout.of(value)
        if not isinstance(value, str):
            raise NotationError(f"{is_a(value)}, not the text of a placement")
        return parse_placement(value)
    except NotationError as error:  # msgspec adds the place to a ValueError
        raise ValueError(first_line(error)) from error


# ---- Writing ---------------------------------------------------------------------------------------------------------


class _Table(dict[T, int]):
    """Positions of distinct values, numbered in the order in which they are first looked up."""

    def __missing__(self, value: T) -> int:
        self[value] = len(self)
        return self[value]


def save_plan(plan: PlanData, path: str | PathLike[str]) -> None:
    """Writes a plan to a file, completely or not at all; PlanFileError if that fails."""
    file = _path(path)
    partial = file.with_name(f"{file.name}.{getpid()}.part")
    try:
        partial.write_bytes(plan_bytes(plan))
        partial.replace(file)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise PlanFileError(f"cannot write the plan file {str(file)!r}: {error.strerror}") from error


def plan_bytes(plan: PlanData) -> bytes:
    """The content of the file of a plan."""
    content = _content(plan)
    content["seals"] = _seals(content)
    return ("{" + ",\n".join(f'"{name}":{_lines(value)}' for name, value in content.items()) + "}\n").encode()


def _content(plan: PlanData) -> dict[str, Any]:
    """The fields of the file by name, in their order, without the seals."""
    s = plan.solution
    layouts, signatures = _Table[Layout](), _Table[Signature]()
    given: dict[str, Any] = {"format": FORMAT, "version": VERSION, "mesh": dict(plan.mesh), "seals": ()}
    topology = plan.topology if plan.host else without_host_of_preset(plan.topology)
    given["topology"] = {name: getattr(topology, name) for name in written_fields(topology)}
    given |= {name: getattr(s, attribute) for name, attribute in OF_SOLUTION.items()}
    given["ops"] = [(op, tuple(signatures[row] for row in rows)) for op, rows in sorted(s.rows.items())]
    given["values"] = [(value, layouts[layout]) for value, layout in sorted(s.layouts.items())]
    given["uses"] = [(op, i, layouts[layout]) for (op, i), layout in sorted(s.uses.items())]
    given["moves"] = [
        StepRecord(value, m.kind, m.axes, m.source, m.target, layouts[m.before], layouts[m.after], m.bytes, m.seconds)
        for value, tree in sorted(s.trees.items())
        for m in tree
    ]
    given["prefetch"] = tuple((op, each.ahead, each.behind) for op, each in sorted(s.prefetch.items()))
    given["collectives"] = [_without_parts(c) for c in plan.collectives]
    given["parts"] = [(i, list(map(_without_parts, c.parts))) for i, c in enumerate(plan.collectives) if c.parts]
    position = {step: i for i, step in enumerate(_moves(s))} if s.buckets or s.rings else {}
    given["buckets"] = list(_bucket_records(s, position))
    given["rings"] = [RingRecord(position[ring.value, ring.layout], ring.products) for ring in s.rings]
    steps = [step for _, tree in sorted(s.trees.items()) for step in tree]
    given["formats"] = [(i, step.format) for i, step in enumerate(steps) if step.format]
    given["layouts"] = list(layouts)
    given["signatures"] = [SignatureRecord(row.inputs, row.outputs, row.size, row.collectives) for row in signatures]
    lacking = {"regions": not plan.regions, "utilization": plan.utilization == Utilization(), "jax": not plan.jax}
    lacking |= {"exposed": not plan.exposed, "buckets": not s.buckets, "parts": not given["parts"]}
    lacking |= {"rings": not s.rings, "recomputation": plan.recomputation is None, "effort": plan.effort == PROVE}
    lacking |= {"host": plan.host is None, "compiled": not plan.compiled, "checkpoints": plan.checkpoints}
    lacking |= {"low_bits": not plan.low_bits, "formats": not given["formats"], "alternatives": not plan.alternatives}
    lacking |= {"prefetched": not plan.prefetched, "prefetch": not s.prefetch}
    names = [name for name in PlanFile.__struct_fields__ if not lacking.get(name)]  # earlier files lack them, too
    return {name: given[name] if name in given else getattr(plan, name) for name in names}


def _without_parts(c: Collective) -> dict[str, Any]:
    """The fields of a collective but its parts, which stand by themselves, and a ring or format that it has not."""
    lacking = {"parts", *(name for name in ("ring", "format") if not getattr(c, name))}
    return {field.name: getattr(c, field.name) for field in fields(c) if field.name not in lacking}


def _moves(s: Solution) -> Iterator[tuple[int, Layout]]:
    """The reshard steps in their order in the file."""
    return ((value, step.after) for value, tree in sorted(s.trees.items()) for step in tree)


def _bucket_records(s: Solution, position: Mapping[tuple[int, Layout], int]) -> Iterator[BucketRecord]:
    for bucket in s.buckets:
        moves = tuple(position[step] for step in bucket.steps)
        yield BucketRecord(moves, bucket.before, bucket.bytes, bucket.seconds, bucket.workspace)


def _lines(value: Any) -> str:
    """JSON with one line per entry of a list."""
    if isinstance(value, list | tuple) and value:
        return "[\n" + ",\n".join(as_json(entry).decode() for entry in value) + "\n]"
    return as_json(value).decode()


def _seals(content: Mapping[str, Any]) -> Seals:
    digests = ((name, sha256(as_json(value)).hexdigest()) for name, value in content.items() if name != "seals")
    return tuple((name, digest[:_SEAL_DIGITS]) for name, digest in digests)


# ---- Reading ---------------------------------------------------------------------------------------------------------


def read_plan(path: str | PathLike[str]) -> PlanData:
    """The plan in a file.

    Raises:
      PlanFileError: the file cannot be read, is not a plan file, has another version, or was damaged.
    """
    file = _path(path)
    try:
        data = read_regular(file, MOST_BYTES)
    except OSError as error:
        raise PlanFileError(f"cannot read the plan file {str(file)!r}: {error.strerror}") from error
    _check_head(str(file), data)
    try:
        record = msgspec.json.decode(data, type=PlanFile, dec_hook=_from_text)
        rows = [*_broken_seals(msgspec.json.decode(data)), *file_faults(record)]
    except _UNREADABLE as error:
        rows = [str(error)]
    if rows:
        raise PlanFileError(faults(f"{str(file)!r} is a damaged plan file:", shortened(rows), _REMEDY))
    plain = {field.name for field in fields(PlanData)} & {*PlanFile.__struct_fields__}
    given, parts = {name: getattr(record, name) for name in plain}, dict(record.parts)
    given["collectives"] = tuple(replace(c, parts=parts.get(i, ())) for i, c in enumerate(record.collectives))
    return PlanData(
        **given,
        identity=Lazy.known(record.fingerprint),
        solution=_solution(record),
        timing=Lazy.known(Timing(record.spans, record.simulated_seconds, record.utilization, record.exposed)),
    )


def _path(path: object) -> Path:
    if not isinstance(path, str | PathLike):
        raise PlanFileError(f"{is_a(path)}, not the path of a plan file")
    return Path(path)


def _check_head(path: str, data: bytes) -> None:
    try:
        head = msgspec.json.decode(data, type=PlanFileHead)
    except _UNREADABLE as error:
        if path.endswith(".py"):
            there = "commands that compare take the saved plan first, then the program"
            raise PlanFileError(f"{path!r} is not a plan file but a program\n{there}") from error
        raise PlanFileError(f"{path!r} is not a plan file: {error}\nplan.save(path) writes one") from error
    if head.format != FORMAT:
        raise PlanFileError(f"{path!r} is not a plan file: its format is {head.format!r}\nplan.save(path) writes one")
    if head.version != VERSION:
        rows = [f"version: {head.version} in the file, {VERSION} in this meshdsl"]
        raise PlanFileError(faults(f"{path!r} is a plan file of another version:", rows, "plan again and save it"))


def _broken_seals(content: Mapping[str, Any]) -> Iterator[str]:
    sealed = dict(content["seals"])
    for name, seal in _seals(content):
        if sealed.get(name) != seal:
            yield f"{name}: changed since it was saved"


def _solution(f: PlanFile) -> Solution:
    rows = [Signature(s.inputs, s.outputs, s.size, s.collectives) for s in f.signatures]
    trees, formats = dict[int, list[ReshardStep]](), dict(f.formats)
    for i, m in enumerate(f.moves):
        ends = m.source, m.target, f.layouts[m.before], f.layouts[m.after]
        step = ReshardStep(m.kind, m.axes, *ends, m.bytes, m.seconds, formats.get(i, ""))
        trees.setdefault(m.value, []).append(step)
    return Solution(
        mesh=f.planned_mesh,
        rows={op: tuple(rows[i] for i in chosen) for op, chosen in f.ops},
        layouts={value: f.layouts[i] for value, i in f.values},
        uses={(op, i): f.layouts[at] for op, i, at in f.uses},
        trees={value: tuple(tree) for value, tree in trees.items()},
        prefetch={op: Prefetch(ahead, behind) for op, ahead, behind in f.prefetch},
        buckets=tuple(_bucket(record, f) for record in f.buckets),
        rings=tuple(_ring(record, f) for record in f.rings),
        **{attribute: getattr(f, name) for name, attribute in OF_SOLUTION.items()},
    )


def _bucket(record: BucketRecord, f: PlanFile) -> Bucket:
    first, *_ = moves = [f.moves[i] for i in record.moves]
    steps = tuple((m.value, f.layouts[m.after]) for m in moves)
    return Bucket(steps, record.before, first.kind, first.axes, record.bytes, record.seconds, record.workspace)


def _ring(record: RingRecord, f: PlanFile) -> Ring:
    move = f.moves[record.move]
    return Ring(move.value, f.layouts[move.after], record.products)


# ---- Faults: the tables ----------------------------------------------------------------------------------------------

_KEYS = re.compile(r"key<\w+>")
_LARGEST = 1e18  # seconds or bytes
_ROUNDING = 1e-6  # part of the seconds by which rounding may lift the lower bound above them
Sent = tuple[str, tuple[str, ...], int]  # kind, axes and bytes of a collective


def file_faults(f: PlanFile) -> list[str]:
    """One row per faulty entry; faults of the tables come alone, as everything else refers to them."""
    for stage in (_table_faults, _reference_faults, _consistency_faults):
        rows = list(stage(f))
        if rows:
            return rows
    return []


def _table_faults(f: PlanFile) -> Iterator[str]:
    try:
        mesh = f.planned_mesh
    except MeshDSLError as error:
        yield f"mesh: {first_line(error)}"
        return
    yield from _figure_faults(f)
    for i, layout in enumerate(f.layouts):
        yield from (f"layouts[{i}] '{layout}': {text}" for text in _axis_faults(layout, mesh))
    for name, arrays in (("inputs", f.inputs), ("outputs", f.outputs)):
        for i, array in enumerate(arrays):
            yield from (f"{_entry(name, i, array)}: {text}" for text in _array_faults(array, mesh))


def _is_dtype(name: str) -> bool:
    """Whether it names numbers, or keys of random numbers."""
    try:
        return bool(_KEYS.fullmatch(name)) or jnp.dtype(name).name == name
    except TypeError:
        return False


def _figure_faults(f: PlanFile) -> Iterator[str]:
    """Times and bytes of the step are possible, and the lower bound is one."""
    for name in ("seconds", "lower_bound", "simulated_seconds", "peak"):
        if not 0 <= (figure := getattr(f, name)) < _LARGEST:
            yield f"{name}: {figure}, which is not from 0 to {_LARGEST:g}"
    if f.lower_bound > f.seconds * (1 + _ROUNDING):
        yield f"lower_bound: {f.lower_bound} s, above the {f.seconds} s of the plan"


def _entry(name: str, i: int, array: Array) -> str:
    return f"{name}[{i}] {array.path}".rstrip()


def _axis_faults(layout: Layout, mesh: Mesh) -> Iterator[str]:
    for axis in layout.axes:
        if axis not in mesh.names:
            yield f"no axis {axis!r} in the mesh{nearest(axis, mesh.names)}"
        elif isinstance(at := layout.on(axis), Split) and isinstance(at.dim, str):
            yield f"{axis}={at} names a dim; plan files number dims"
    missing = [axis for axis in mesh.names if axis not in layout.axes]
    if missing:
        yield f"no placement for axis {', '.join(missing)}"


def _array_faults(array: Array, mesh: Mesh) -> Iterator[str]:
    found = list(_axis_faults(array.layout, mesh))
    if not _is_dtype(array.dtype):
        found.append(f"no dtype {array.dtype!r}")
    if found:
        yield from found
        return
    split = [p.dim for _, p in array.layout.placements if isinstance(p, Split)]
    beyond = [dim for dim in split if not isinstance(dim, int) or dim >= len(array.shape)]
    if beyond:
        yield f"{array.layout} splits dim {beyond[0]}, which {array.type} does not have"
    elif not fits(array.layout, array.shape, mesh):
        yield f"{array.layout} does not divide {array.type} on mesh {mesh}"


# ---- Faults: references between tables -------------------------------------------------------------------------------


def _reference_faults(f: PlanFile) -> Iterator[str]:
    """References to a layout, signature, value or line that does not exist, and duplicate entries."""
    values = {value for value, _ in f.values}

    def layout(table: str, i: int, at: int) -> Iterator[str]:
        if not 0 <= at < len(f.layouts):
            yield f"{table}[{i}]: no layout {at}; the file has layouts 0 to {len(f.layouts) - 1}"

    for i, (_, rows) in enumerate(f.ops):
        yield from (f"ops[{i}]: no signature {row}" for row in rows if not 0 <= row < len(f.signatures))
        if len(rows) != len(f.mesh):
            yield f"ops[{i}]: {len(rows)} signatures for {len(f.mesh)} mesh axes"
    for i, (_, at) in enumerate(f.values):
        yield from layout("values", i, at)
    for i, (_, _, at) in enumerate(f.uses):
        yield from layout("uses", i, at)
    for i, move in enumerate(f.moves):
        yield from (*layout("moves", i, move.before), *layout("moves", i, move.after))
        if move.value not in values:
            yield f"moves[{i}]: no value {move.value}"
    for i, bucket in enumerate(f.buckets):
        yield from (f"buckets[{i}]: no move {at}" for at in bucket.moves if not 0 <= at < len(f.moves))
        if bucket.before not in {op for op, _, _ in f.uses}:
            yield f"buckets[{i}]: no operation {bucket.before} that uses a value"
    for i, ring in enumerate(f.rings):
        if not 0 <= ring.move < len(f.moves):
            yield f"rings[{i}]: no move {ring.move}"
        elif len(f.moves[ring.move].axes) != 1:
            yield f"rings[{i}]: moves[{ring.move}] is over {len(f.moves[ring.move].axes)} axes, a ring over one"
    for i, (at, name) in enumerate(f.formats):
        if not 0 <= at < len(f.moves):
            yield f"formats[{i}]: no move {at}"
        if name not in FORMATS:
            yield f"formats[{i}]: no format {name!r}{nearest(name, FORMATS)}"
    known = range(len(f.collectives))
    yield from (f"parts[{i}]: no collective {at}" for i, (at, _) in enumerate(f.parts) if at not in known)
    yield from _duplicates("buckets", "reshard step", [at for bucket in f.buckets for at in bucket.moves])
    yield from _duplicates("parts", "collective", [at for at, _ in f.parts])
    yield from _duplicates("formats", "reshard step", [at for at, _ in f.formats])
    yield from _duplicates("rings", "reshard step", [ring.move for ring in f.rings])
    yield from (f"spans[{i}]: no line {s.line}" for i, s in enumerate(f.spans) if not 0 <= s.line < len(f.lines))
    yield from _duplicates("ops", "operation", [op for op, _ in f.ops])
    yield from _duplicates("values", "value", [value for value, _ in f.values])
    yield from _duplicates("uses", "operand", [(op, operand) for op, operand, _ in f.uses])
    yield from _duplicates("prefetch", "loop", [op for op, _, _ in f.prefetch])


def _duplicates(table: str, noun: str, ids: Sequence[object]) -> Iterator[str]:
    first: dict[object, int] = {}
    for i, one in enumerate(ids):
        if first.setdefault(one, i) != i:
            yield f"{table}[{i}]: duplicate of {table}[{first[one]}], {noun} {one}"


# ---- Faults: one plan ------------------------------------------------------------------------------------------------


def _consistency_faults(f: PlanFile) -> Iterator[str]:
    mesh = f.planned_mesh
    for check in _CHECKS:
        yield from check(f, mesh)


def _host_faults(f: PlanFile, mesh: Mesh) -> Iterator[str]:
    """The arrays in the host's memory are those whose layouts say so, and no value inside is."""
    yield from (
        f"layouts[{i}] '{x}': a value inside the step has no memory" for i, x in enumerate(f.layouts) if x.memory
    )
    listed = {array.path for array in f.host.arrays} if f.host else set[str]()
    hosted = {array.path for array in f.inputs if array.layout.memory == "host"}
    hosted |= {
        f"output {array.path}".rstrip()
        for array in f.outputs
        if array.layout.memory == "host" and array.follows not in hosted
    }
    yield from (f"host: {path} is listed, but not @host" for path in sorted(listed - hosted))
    yield from (f"host: {path} is @host, but not listed" for path in sorted(hosted - listed))


def _effort_faults(f: PlanFile, mesh: Mesh) -> Iterator[str]:
    if f.effort not in EFFORTS:
        yield f"effort: {f.effort!r} is none of {', '.join(map(repr, EFFORTS))}{likely(f.effort, EFFORTS)}"


def _low_bits_faults(f: PlanFile, mesh: Mesh) -> Iterator[str]:
    """Formats are those that the budget allows."""
    try:
        low_bits = LowBits.of(f.low_bits) if f.low_bits else None
    except MeshDSLError as error:
        yield first_line(error)
        return
    for i, (at, name) in enumerate(f.formats):
        if low_bits is None:
            yield f"formats[{i}]: moves[{at}] sends {name}, but the plan has no budget low_bits"
        elif name not in low_bits.within:
            yield f"formats[{i}]: moves[{at}] sends {name}, which loses more than low_bits={low_bits}"


def _timing_faults(f: PlanFile, mesh: Mesh) -> Iterator[str]:
    if f.exposed and len(f.exposed) != len(f.collectives):
        yield f"exposed: seconds of {len(f.exposed)} collectives, of {len(f.collectives)}"


def _boundary_faults(f: PlanFile, mesh: Mesh) -> Iterator[str]:
    """The first values are the inputs, and an output has the layout of the input that it aliases."""
    own = {value: f.layouts[at] for value, at in f.values}
    paths = {array.path: array.layout for array in f.inputs}
    for i, array in enumerate(f.inputs):
        if own.get(i) != array.layout.within(""):
            yield f"{_entry('inputs', i, array)}: {array.layout}, but value {i} has layout {own.get(i)}"
    for i, array in enumerate(f.outputs):
        if array.follows and paths.get(array.follows, Layout()).within("") != array.layout.within(""):
            alias = f"layout {paths[array.follows]}" if array.follows in paths else "no entry in inputs"
            yield f"{_entry('outputs', i, array)}: {array.layout}, but {array.follows}, which it aliases, has {alias}"


def _use_faults(f: PlanFile, mesh: Mesh) -> Iterator[str]:
    """Every operation uses its operands in the layouts of its signatures."""
    rows = {op: [f.signatures[i] for i in found] for op, found in f.ops}
    for i, (op, operand, at) in enumerate(f.uses):
        for axis, row in zip(mesh.names, rows.get(op, ()), strict=False):
            used = f.layouts[at].on(axis)
            signed = row.inputs[operand] if 0 <= operand < len(row.inputs) else None
            if signed is not used:
                yield (
                    f"uses[{i}]: operation {op} uses operand {operand} with {axis}={used}, "
                    f"but its signature has {signed}"
                )


def _step_faults(f: PlanFile, mesh: Mesh) -> Iterator[str]:
    """Every reshard step exists, and starts from a layout that is available by then."""
    available, formats = {value: [f.layouts[at]] for value, at in f.values}, dict(f.formats)
    for i, m in enumerate(f.moves):
        before, after = f.layouts[m.before], f.layouts[m.after]
        if before not in available[m.value]:
            there = " and ".join(map(str, available[m.value]))
            yield f"moves[{i}]: starts from {before}, but value {m.value} is available as {there}"
        elif not _is_step(m, before, after, mesh, i in formats):
            yield f"moves[{i}]: no {m.kind} over {','.join(m.axes)} leads from {before} to {after}"
        available[m.value].append(after)


def _is_step(m: StepRecord, before: Layout, after: Layout, mesh: Mesh, is_low: bool) -> bool:
    splits = (p.dim for layout in (before, after) for _, p in layout.placements if isinstance(p, Split))
    rank = 1 + max((dim for dim in splits if isinstance(dim, int)), default=-1)
    step = (m.kind, m.axes, m.source, m.target, after)
    kinds = ((e.low and e.low.kind if is_low else e.kind, e) for e in reshard_edges(before, rank, mesh))
    return any((kind, e.axes, e.source, e.target, e.after) == step for kind, e in kinds)


def _collective_faults(f: PlanFile, mesh: Mesh) -> Iterator[str]:
    """The collectives are those of the reshard steps, and of local programs where signatures have any."""
    listed: dict[Sent, list[int]] = {}
    for i, c in enumerate(f.collectives):
        listed.setdefault((c.kind, c.axes, c.bytes), []).append(i)
    together = {at for bucket in f.buckets for at in bucket.moves}
    rings = {ring.move for ring in f.rings}
    sends = [
        (f"moves[{i}]", _hop(m, mesh) if i in rings else (m.kind, m.axes, m.bytes))
        for i, m in enumerate(f.moves)
        if i not in together
    ]
    for i, bucket in enumerate(f.buckets):
        kinds = {(f.moves[at].kind, f.moves[at].axes) for at in bucket.moves}
        if len(kinds) != 1:
            yield f"buckets[{i}]: reshard steps of {len(kinds)} kinds or axes are sent as one"
        sends += [(f"buckets[{i}]", (*kind, bucket.bytes)) for kind in kinds]
    for name, sent in sends:
        if sent[0] in COLLECTIVES and listed.get(sent):
            listed[sent].pop()
        elif sent[0] in COLLECTIVES:
            yield f"collectives: missing for {name}, {_sent_text(sent)}"
    if (inside := sum(len(parts) for _, parts in f.parts)) != len(together):
        yield f"parts: {inside} collectives, of {len(together)} that are sent in buckets"
    if not f.compiled and not any(signature.collectives for signature in f.signatures):
        rest = ((i, sent) for sent, positions in listed.items() for i in positions)
        yield from (f"collectives[{i}]: no reshard step sends {_sent_text(sent)}" for i, sent in rest)


def _hop(m: StepRecord, mesh: Mesh) -> Sent:
    return "collective-permute", m.axes, m.bytes // max(1, mesh.axis(m.axes[0]) - 1)


def _sent_text(sent: Sent) -> str:
    kind, axes, size = sent
    return f"{kind} over {','.join(axes)} of {size} bytes"


def _span_faults(f: PlanFile, mesh: Mesh) -> Iterator[str]:
    """Every collective has a line, and exactly one span waits for it."""
    known = {line.source for line in f.lines}
    yield from (f"collectives[{i}]: no line {c.source!r}" for i, c in enumerate(f.collectives) if c.source not in known)
    waited = sum(span.collectives for span in f.spans)
    if waited != len(f.collectives):
        yield f"spans: {waited} collectives are waited for, of {len(f.collectives)}"


def _prefetch_faults(f: PlanFile, mesh: Mesh) -> Iterator[str]:
    """Every loop that sends ahead or behind is described."""
    if len(f.prefetch) != len(f.prefetched):
        yield f"prefetched: {len(f.prefetched)} loops, but prefetch has {len(f.prefetch)}"


_CHECKS: tuple[Callable[[PlanFile, Mesh], Iterator[str]], ...] = (
    _boundary_faults,
    _use_faults,
    _step_faults,
    _collective_faults,
    _span_faults,
    _effort_faults,
    _host_faults,
    _low_bits_faults,
    _timing_faults,
    _prefetch_faults,
)
