"""Globs over paths, resolved to one layout per input and output, with all faults in one error.

    layouts = {"batch": "data=S(0)", "params/**/w1": "model=S(1)"}      inputs
    outputs = {"2": "data=B"}                                           results

Axes that a pin does not name are free. Of several globs that match one array, the last one wins, axis by axis; an axis
that is named again becomes the minor-most where several split one dim. ``"data=S(0) @host"`` also says that an array
lives in the host's memory, and the last pin that names a memory wins. ``constrain`` operations inside the step are
checked here too.

Results that replace an argument take its layout: a result, or a subtree of it, follows the first unused argument with
the same keys, shapes and dtypes. In ``step(params, state, batch) -> params, state, loss`` the first two results follow
the first two arguments, and the loss is free. A result that ``outputs`` pins follows no argument.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import combinations
from typing import Any

from meshdsl.errors import NotationError, PinError, faults, nearest, shortened
from meshdsl.ir.graph import Leaf, Op, TracedProgram
from meshdsl.ir.index import ops_named
from meshdsl.ir.solution import Pins
from meshdsl.layouts.axis_rules import Rules
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.notation import MEMORIES
from meshdsl.layouts.placement import REDUCTIONS, B, P, Placement
from meshdsl.layouts.topology import no_host_memory
from meshdsl.pins.axis_rules import RulePins, UnusedRules, kinds
from meshdsl.pins.conflicts import (
    UNEVEN,
    contradictions,
    divisible,
    entries,
    leaf_faults,
    merge,
    uneven_axes,
    without_uneven,
)
from meshdsl.pins.shard_maps import check_shard_map_meshes
from meshdsl.rules.registry import carries
from meshdsl.schedules.pipelined import Pipelined
from meshdsl.util.lazy import memoize_by_object
from meshdsl.util.paths import Components, matches, split_path, suggest

Table = Mapping[str, Layout | str]
_SHOWN, _FREE = 3, Layout()


@dataclass(frozen=True)
class UserPins:
    """The user's pins, not yet resolved: a value that can be resolved for a program and for every rewrite of it.

    Args:
      layouts: layouts by globs over the inputs' paths.
      outputs: layouts by globs over the outputs' paths.
      rules: mesh axes by named dims.
      donated: indices of flat inputs whose buffers the step may reuse.
      uneven: what becomes of a pin that does not divide: an "error", or it is replicated over the axes concerned;
        under "pad" the program has it as a constraint too (``meshdsl.padding.uneven_pins``).
      by: words that follow a glob in errors, ``" by md.fsdp()"``, by the glob.
    """

    layouts: Table = field(default_factory=dict)
    outputs: Table = field(default_factory=dict)
    rules: Rules = field(default_factory=Rules)
    donated: tuple[int, ...] = ()
    uneven: str = "error"
    by: Mapping[str, str] = field(default_factory=dict)

    def unused_rules(self, program: TracedProgram) -> list[str]:
        """Return a line that lists the dims with a rule that no array of ``program`` has; none if there are none."""
        return UnusedRules(program, self.rules, kinds(program, replaced_inputs(program))).notes()

    def resolve(self, program: TracedProgram, mesh: Mesh) -> Pins:
        """Return the pins of every input and output of ``program``; PinError lists all faults at once."""
        loose = self.uneven != "error"
        return make_pins(program, mesh, self.layouts, self.outputs, self.donated, self.rules, loose, self.by)

    def stated(self, program: TracedProgram, mesh: Mesh) -> Pins:
        """Return the pins as ``resolve``, but those of inputs that do not divide as they were stated."""
        pins, (uneven, _) = self.resolve(program, mesh), self.loosened(program, mesh)
        return replace(pins, inputs=tuple(uneven.get(i, pin) for i, pin in enumerate(pins.inputs)))

    def loosened(self, program: TracedProgram, mesh: Mesh) -> tuple[dict[int, Layout], dict[int, Layout]]:
        """Returns the pins, as stated, of inputs and of outputs that do not divide, by their index."""
        given, wanted, _ = _sides(program, mesh, self.layouts, self.outputs, self.rules, loose=True, by=self.by)
        return given.uneven, wanted.uneven


def make_pins(
    program: TracedProgram,
    mesh: Mesh,
    layouts: Table | None = None,
    outputs: Table | None = None,
    donated: Iterable[int] = (),
    rules: Rules | None = None,
    loose: bool = False,
    by: Mapping[str, str] | None = None,
) -> Pins:
    """Returns the pins of every input and output.

    Args:
      layouts: layouts by globs over the inputs' paths.
      outputs: layouts by globs over the outputs' paths.
      donated: indices of inputs whose memory the step may reuse.
      rules: mesh axes by named dims; where a glob names the same axis, the glob wins.
      loose: pins that split a dim unevenly are replicated over the axes concerned.
      by: words that follow a glob in errors, by the glob.

    Raises:
      PinError: lists all faults at once.
    """
    check_shard_map_meshes(program, mesh)
    given, wanted, rows = _sides(program, mesh, layouts or {}, outputs or {}, rules or Rules(), loose, by or {})
    for op in ops_named(program.graph, "constrain"):
        rows += _constrain_faults(op, mesh)
    if "host" in (*given.memories, *wanted.memories):
        rows += _host_faults(program, mesh)
    if rows:
        raise PinError(faults(f"the pins of {program.name} do not fit, on mesh {mesh}:", rows, _remedy(program, rows)))
    results = (*wanted.pins, *[_FREE] * (len(program.outputs) - len(wanted.pins)))
    kept = tuple(None if pin.axes else source for pin, source in zip(results, replaced_inputs(program), strict=True))
    hosted, on_device = (frozenset(i for i, memory in enumerate(given.memories) if memory == name) for name in MEMORIES)
    stated = (*wanted.memories, *[""] * (len(program.outputs) - len(wanted.memories)))
    places = enumerate(zip(stated, kept, strict=True))
    sent = frozenset(j for j, (memory, i) in places if memory == "host" or (not memory and i in hosted))
    return Pins(given.pins, results, kept, frozenset(donated), hosted, sent, on_device)


def overridden_pins(table: Table, program: TracedProgram) -> list[str]:
    """Returns a line per two globs that pin an axis of an input differently: the later one decides."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for leaf in program.inputs:
        decides: dict[str, tuple[str, Placement]] = {}
        for glob, text in table.items():
            for axis, placed in _stated_on(text, leaf) if is_named(glob, leaf) else ():
                before = decides.get(axis)
                if before is not None and before[1] is not placed:
                    found.setdefault((axis, before[0], glob), []).append(leaf.path)
                decides[axis] = glob, placed
    return [
        f"layouts: {glob!r} decides over {before!r} on {axis}: {', '.join(shortened(paths, _SHOWN))}"
        for (axis, before, glob), paths in found.items()
    ]


def _stated_on(text: Layout | str, leaf: Leaf) -> tuple[tuple[str, Placement], ...]:
    """Returns the placements by axis that a pin states; none if it cannot be read, which ``make_pins`` reports."""
    try:
        return Layout.of(text).numbered(leaf.dims).placements
    except NotationError:
        return ()


def _sides(
    program: TracedProgram,
    mesh: Mesh,
    layouts: Table,
    outputs: Table,
    rules: Rules,
    loose: bool,
    by: Mapping[str, str],
) -> "tuple[_Side, _Side, list[str]]":
    """Returns the pins of the inputs, those of the results, and their faults."""
    ruled = RulePins(program, mesh, rules, replaced_inputs(program), loose)
    rows, results = list(ruled.faults), program.outputs[: program.held.results]
    given = _Side("layouts", "input", program.inputs, mesh, rows, program.pipeline, loose, by)
    wanted = _Side("outputs", "output", results, mesh, rows, program.pipeline, loose, {})
    given.read(layouts, ruled.inputs)
    wanted.read(outputs, ruled.outputs[: len(results)])
    return given, wanted, rows


class _Side:
    """The pins of the inputs, or of the outputs; their faults are appended to ``rows``.

    Args:
      staged: the pipeline, if any; layers need not divide over its stages.
      loose: uneven splits are no faults.
      by: words that follow a glob in errors, by the glob.

    Attributes:
      pins: one per leaf, without axes of size 1, on which all placements are equal.
      uneven: of those, the ones that were loosened, as they were stated.
      memories: one per leaf, empty where no pin names one; the last that does decides.
    """

    def __init__(
        self,
        table: str,
        noun: str,
        leaves: Sequence[Leaf],
        mesh: Mesh,
        rows: list[str],
        staged: Pipelined | None,
        loose: bool,
        by: Mapping[str, str],
    ) -> None:
        self.table, self.noun, self.leaves, self.mesh, self.rows = table, noun, leaves, mesh, rows
        self.staged, self.loose, self.by = staged, loose, by
        self.pins: tuple[Layout, ...] = ()
        self.uneven: dict[int, Layout] = {}
        self.memories: tuple[str, ...] = ()
        self._contradictory: dict[str, list[str]] = {}  # faults by the text of a contradictory set of pins

    def read(self, table: Table, ruled: Sequence[Layout]) -> None:
        """Reads the globs of a table into ``pins``.

        Args:
          ruled: each leaf's layout by the layout rules.
        """
        stated = {glob: pin for glob, text in table.items() if (pin := self._parse(glob, text)) is not None}
        named = {glob: [leaf for leaf in self.leaves if is_named(glob, leaf)] for glob in table}
        for glob, pin in stated.items():
            self._check(glob, pin, named[glob])
        self._check_matches(named)
        merged = [self._merged(leaf, stated, rule) for leaf, rule in zip(self.leaves, ruled, strict=True)]
        self.rows += [text for leaf in self.leaves for text in self._shared_faults(leaf, stated)]
        self.rows += self._contradictions()
        if self.loose and not self.rows:
            fitting = [divisible(leaf.shape, pin, self.mesh) for leaf, pin in zip(self.leaves, merged, strict=True)]
            pairs = enumerate(zip(merged, fitting, strict=True))
            self.uneven = {i: before for i, (before, after) in pairs if before != after}
            merged = fitting
        self.pins = tuple(merged)
        self.memories = tuple(
            next((pin.memory for glob, pin in reversed(stated.items()) if pin.memory and is_named(glob, leaf)), "")
            for leaf in self.leaves
        )

    def _parse(self, glob: str, text: Layout | str) -> Layout | None:
        try:
            return Layout.of(text)
        except NotationError as error:
            self.rows.append(f"{self._label(glob)}: " + str(error).replace("\n", "\n  "))
            return None

    def _check(self, glob: str, pin: Layout, named: Sequence[Leaf]) -> None:
        found = [*_axis_faults(pin, self.mesh), *self._partial_faults(pin)]
        apart = [text for leaf in named for text in self._leaf_faults(leaf.path, leaf, pin)]
        more = [f"... and {len(apart) - _SHOWN} more like it"] if len(apart) > _SHOWN else []
        self.rows += [f"{self._label(glob)}: {text}" for text in (*found, *apart[:_SHOWN], *more)]

    def _check_matches(self, named: Mapping[str, Sequence[Leaf]]) -> None:
        paths = [path for leaf in self.leaves for path in leaf.paths]
        for glob, found in named.items():
            if not found:
                self.rows.append(f"{self._label(glob)}: matches no {self.noun}{suggest(glob, paths)}")

    def _partial_faults(self, pin: Layout) -> list[str]:
        reason = "cannot be partial (P); only S and B cross the boundary of a step"
        return [f"{axis}={pin.on(axis)}: an {self.noun} {reason}" for axis in pin.partial()]

    def _merged(self, leaf: Leaf, stated: Mapping[str, Layout], rule: Layout) -> Layout:
        named = entries(rule, leaf.dims)
        globs = [glob for glob in stated if is_named(glob, leaf)]
        named += [(f"{glob!r}{self.by.get(glob, '')}", stated[glob].numbered(leaf.dims)) for glob in globs]
        if not named:
            return _FREE
        if not any(self._leaf_faults("", leaf, pin) for _, pin in named):
            for said, texts in contradictions(named, lambda pin: self._leaf_faults(leaf.path, leaf, pin)):
                self._contradictory.setdefault(said, []).extend(texts)
        pin = without_uneven(leaf, merge(pin for _, pin in named), self.mesh, self.staged)
        return Layout(**{n: p for n, p in pin.placements if self.mesh.sizes_by_name.get(n, 1) > 1})

    def _contradictions(self) -> Iterator[str]:
        """Yields a row per array, only the first few for one set of pins."""
        for said, texts in self._contradictory.items():
            for text in shortened(texts, _SHOWN):
                yield f"{self.table}: contradictory pins, {said}: {text}"

    def _shared_faults(self, leaf: Leaf, stated: Mapping[str, Layout]) -> Iterator[str]:
        """Yields a row for each two paths of an array that pins treat differently."""
        for one, other in combinations(leaf.paths, 2):
            a, b = (merge(p.numbered(leaf.dims) for g, p in stated.items() if matches(g, x)) for x in (one, other))
            if any(a.on(axis) != b.on(axis) for axis in a.axes if axis in b.axes):
                yield f"{self.table}: {one} and {other} are one array, which cannot be both {a} and {b}"

    def _leaf_faults(self, name: str, leaf: Leaf, pin: Layout) -> list[str]:
        return leaf_faults(name, leaf, pin, self.mesh, uneven_axes(leaf, self.mesh, self.staged), self.loose)

    def _label(self, glob: str) -> str:
        return f"{self.table}[{glob!r}]{self.by.get(glob, '')}"


def is_named(glob: str, leaf: Leaf) -> bool:
    """Whether the glob matches a path of the array."""
    return any(matches(glob, path) for path in leaf.paths)


def _axis_faults(pin: Layout, mesh: Mesh) -> list[str]:
    unknown = (axis for axis in pin.axes if axis not in mesh.names)
    return [f"no axis {axis!r} in the mesh{nearest(axis, mesh.names)}" for axis in unknown]


def _constrain_faults(op: Op, mesh: Mesh) -> list[str]:
    value, pin = op.outputs[0], op.params["layout"]
    leaf = Leaf("", value.shape, value.dtype, dims=op.params["names"])
    inside = [axis for axis in pin.axes if axis in op.manual and pin.on(axis) is not B]
    found = [f"{axis}={pin.on(axis)}: the shard_map around it divides over {axis} itself" for axis in inside]
    instead = "; constraints='ignore' plans freely" if "by" in op.params else ""
    found += [text + instead for text in _axis_faults(pin, mesh)]
    found += [*leaf_faults("a value", leaf, pin, mesh), *_unreducible(pin, leaf.dtype)]
    if pin.memory:
        where = "inside the step values are on the device; layouts= and outputs= say where inputs and results live"
        found.append(f"@{pin.memory}: {where}")
    return [f"{op.called} at {op.source}: {text}" for text in (*found, *_two_reductions(pin, mesh))]


def _host_faults(program: TracedProgram, mesh: Mesh) -> Iterator[str]:
    """Yields why arrays cannot be kept in the host's memory."""
    if not mesh.topology.host_memory:
        yield f"@host: {no_host_memory(mesh.topology)}"
    if program.pipeline and program.pipeline.axis:
        axis = program.pipeline.axis
        yield f"@host: the step is a pipeline over {axis}, whose stages keep what they need on their devices"


def _two_reductions(pin: Layout, mesh: Mesh) -> list[str]:
    """Returns a row if a value would be partial in two ways: a sum of maxima is not a maximum of sums."""
    wide = [axis for axis in pin.partial() if mesh.sizes_by_name.get(axis, 1) > 1]
    other = next((axis for axis in wide if pin.on(axis) is not pin.on(wide[0])), None)
    if other is None:
        return []
    return [f"{wide[0]}={pin.on(wide[0])} and {other}={pin.on(other)} contradict: a value is partial in one way only"]


def _unreducible(pin: Layout, dtype: Any) -> list[str]:
    """Returns a row for every partial placement whose reduction the dtype does not have."""
    alien = [(axis, pin.on(axis)) for axis in pin.partial() if not carries(pin.on(axis), dtype)]
    known = [p for p in map(P, REDUCTIONS) if carries(p, dtype)]
    said = f"it can be {' or '.join(map(str, known))}" if known else "state S or B"
    return [f"{axis}={p}: a value of {dtype} has no such reduction; {said}" for axis, p in alien]


def _remedy(program: TracedProgram, rows: Sequence[str]) -> str:
    uneven = any(UNEVEN in row for row in rows)
    names = ", ".join(dict.fromkeys(split_path(leaf.path)[0] for leaf in program.inputs))
    option = "; uneven='pad' or uneven='replicate' takes pins that do not divide" if uneven else ""
    return f"arguments: {names}; '*' is one path component, '**' any number{option}"


@dataclass(frozen=True)
class _Subtree:
    """Leaves of the inputs, or of the outputs, that share the first ``depth`` components of their paths."""

    leaves: Sequence[Leaf]
    members: tuple[int, ...]
    depth: int

    @cached_property
    def key(self) -> tuple[tuple[Components, tuple[int, ...], str], ...]:
        """Paths below the subtree's root, shapes and dtypes; equal for subtrees that can replace each other."""
        leaves = [(i, self.leaves[i]) for i in self.members]
        return tuple([(self._path(i)[self.depth :], leaf.shape, _text(leaf.dtype)) for i, leaf in leaves])

    def resembles(self, other: "_Subtree") -> bool:
        """Whether a subtree has the same paths below its root, and half of the leaves, or more, have the same types."""
        pairs = list(zip(self.key, other.key, strict=False))
        same_paths = len(self.key) == len(other.key) and all(a[0] == b[0] for a, b in pairs)
        return same_paths and len(pairs) > 1 and 2 * sum(a == b for a, b in pairs) >= len(pairs)

    def children(self) -> "list[_Subtree]":
        """Returns the subtrees one path component below."""
        groups: dict[str, list[int]] = {}
        for i in self.members:
            if len(self._path(i)) > self.depth:
                groups.setdefault(self._path(i)[self.depth], []).append(i)
        return [_Subtree(self.leaves, tuple(group), self.depth + 1) for group in groups.values()]

    def _path(self, i: int) -> Components:
        path = self.leaves[i].path
        return split_path(path) if path else ()


def follows(inputs: Sequence[Leaf], outputs: Sequence[Leaf]) -> list[int | None]:
    """Returns, per output, the index of the input that it replaces, or None."""
    found: dict[int, int] = {}
    free = _arguments(inputs)
    pending = [_Subtree(outputs, tuple(range(len(outputs))), 0)]
    while pending:
        subtree = pending.pop(0)
        argument = next((a for a in free if a.key == subtree.key), None)
        if argument is None:
            pending = [*subtree.children(), *pending]
        else:
            free.remove(argument)
            found |= zip(subtree.members, argument.members, strict=True)
    return [found.get(i) for i in range(len(outputs))]


@cache
def _text(dtype: Any) -> str:
    return str(dtype)


@memoize_by_object
def replaced_inputs(program: TracedProgram) -> list[int | None]:
    """Returns, per output, the input that it replaces, or None: that of state in place, else by ``follows``."""
    written, taken = program.held.written, set(program.held.written.values())
    inputs = [i for i in range(len(program.inputs)) if i not in taken]
    outputs = [i for i in range(len(program.outputs)) if i not in written]
    found = follows([program.inputs[i] for i in inputs], [program.outputs[i] for i in outputs])
    sources = {**written, **{i: inputs[j] for i, j in zip(outputs, found, strict=True) if j is not None}}
    return [sources.get(i) for i in range(len(program.outputs))]


def nearly_replaced(program: TracedProgram) -> list[str]:
    """Returns a note per argument that a result would replace, but for the types of some of its leaves.

    Such an argument is not donated as a whole, so old and new state are held at once. A moment of an optimizer may have
    been initialised in another dtype, or a counter have become a float.
    """
    replaced, notes = replaced_inputs(program), list[str]()
    kept = [a for a in _arguments(program.inputs) if not {*a.members} & {*replaced}]
    pending = [_Subtree(program.outputs, tuple(range(len(program.outputs))), 0)]
    while pending:
        result = pending.pop(0)
        argument = next((a for a in kept if a.resembles(result)), None)
        if argument is None:
            pending = [*result.children(), *pending]
            continue
        kept.remove(argument)
        pairs = [(program.inputs[i], program.outputs[j]) for i, j in zip(argument.members, result.members, strict=True)]
        changed = [(a, b) for a, b in pairs if (a.shape, a.dtype) != (b.shape, b.dtype)]
        before, after = changed[0]
        more = f", and {len(changed) - 1} more" if len(changed) > 1 else ""
        notes.append(
            f"{split_path(before.path)[0]} is not replaced, and both are held: {before.path} is {before.type}, and "
            f"{after.path or 'the result'} {after.type}{more}"
        )
    return notes


def _arguments(inputs: Sequence[Leaf]) -> list[_Subtree]:
    """Returns the subtrees of the arguments, one for each of ``*args``."""
    named = _Subtree(inputs, tuple(range(len(inputs))), 0).children()
    starred = [a for a in named if split_path(inputs[a.members[0]].path)[0] == "args"]
    return [part for a in named for part in (a.children() if a in starred else [a])]
