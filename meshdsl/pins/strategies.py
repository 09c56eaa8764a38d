"""Strategies of parallelism as pins: data parallelism, FSDP and tensor parallelism, in one line each.

    layouts=md.data_parallel()                                   # the batch over data
    layouts=md.fsdp(min_size=2**16)                              # and large parameters and optimizer state too
    layouts=md.fsdp() | md.tensor_parallel() | {"batch/mask": "data=B"}

A strategy is only a set of pins, found when the step has been traced: which arrays are the batch, and which state,
follows from what the step replaces. Everything that it does not pin is planned. The plan shows the pins in its column
``pinned``, and a note names the arrays that a strategy left alone, and why. Where a glob names an axis too, it wins.

FSDP, or ZeRO stage 3, is Rajbhandari et al. (2020); the columns and rows of tensor parallelism are those of Megatron-LM
(Shoeybi et al. 2019).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, ClassVar, final

from jax import dtypes

from meshdsl.errors import ArgumentError, NotationError, PinError, faults, is_a, nearest
from meshdsl.ir.graph import Leaf, TracedProgram
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import Placement, S
from meshdsl.pins.axis_rules import ACTIVATIONS, kinds
from meshdsl.pins.read import is_named, replaced_inputs
from meshdsl.pins.sharding_trees import spread
from meshdsl.shardings import Stated, StatedTree, axes_of, pin_of
from meshdsl.util.paths import matches, split_path, suggest

Axes = tuple[str, ...]
BATCH_AXES = ("replica", "dp", "data", "fsdp")  # over which the batch is split unless told otherwise, outermost first
STATE_AXES = ("fsdp", "data", "dp")  # the first of these that the mesh has shards parameters, unless told otherwise
MODEL_AXES = ("model", "tensor", "tp", "mp")
MIN_SIZE = 2**14  # elements; smaller arrays cost a collective's latency and save next to no memory
SHORT = 8  # a dim shorter than the longest one by this factor is that of a window or a stack of layers
LISTED = 3  # arrays that a note names

# Weights of a transformer's projections by the names that flax, haiku, equinox, Llama and GPT-2 give them. A matrix
# ``[in, out]`` of ``COLUMNS`` is split by its outputs, one of ``ROWS`` by its inputs, so that one sum per pair remains.
# ``HEADS`` and ``JOINED`` are flax's projections ``[in, heads, head]`` and ``[heads, head, out]``, split by heads.
HEADS = ("query", "key", "value")
JOINED = ("out",)
COLUMNS = (
    *("q", "k", "v", "qkv", "wq", "wk", "wv", "q_proj", "k_proj", "v_proj", "c_attn", "query", "key", "value"),
    *("up", "gate", "up_proj", "gate_proj", "wi", "wi_0", "wi_1", "w1", "w3", "fc1", "c_fc", "fc_in"),
)
ROWS = (
    *("o", "wo", "o_proj", "out_proj", "out", "attn_out"),
    *("down", "down_proj", "w2", "fc2", "fc_out", "mlp_out"),
)


@dataclass(frozen=True)
class Strategy(ABC):
    """Pins that depend on the traced step: which arrays are the batch, which state, and how large they are.

    Args:
      axis: the mesh axes, major first; empty for those of the usual names.
    """

    axis: Axes = ()
    name: ClassVar[str]  # of the function in ``md``

    @abstractmethod
    def pins(self, arrays: "Arrays", before: Mapping[int, Layout]) -> dict[int, Layout]:
        """Returns a layout per input that this pins.

        Args:
          before: those that strategies applied earlier pinned, on other axes.
        """


@dataclass(frozen=True)
class LayoutTable(Mapping[str, Stated]):
    """What ``layouts=`` states: layouts by globs, which this is a mapping of, and strategies besides.

    Args:
      globs: layouts by globs; of several that match, the last wins, axis by axis, and any glob wins over a strategy.
      strategies: in the order in which they were combined.
      as_given: arguments that lie sharded pin their inputs as they lie.
      given: their layouts by path, once a call is known; globs and strategies win over these.

    Example:
      >>> md.fsdp() | {"params/embed": "model=S(0)"}
    """

    globs: Mapping[str, Any] = field(default_factory=dict)
    strategies: tuple[Strategy, ...] = ()
    as_given: bool = False
    given: Mapping[str, Layout] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Spread pytrees of layouts over the paths of their leaves."""
        object.__setattr__(self, "globs", spread(self.globs))

    @staticmethod
    def of(stated: Mapping[str, StatedTree] | str | None) -> "LayoutTable":
        """Returns what ``layouts=`` states as a table: a dict, a table, the text ``"as-given"``, or nothing."""
        if isinstance(stated, str):
            return LayoutTable(as_given=True)
        return stated if isinstance(stated, LayoutTable) else LayoutTable(stated or {})

    def __or__(self, other: object) -> "LayoutTable":
        """Returns both; globs of ``other`` win over equal ones of this table."""
        if not isinstance(other, Mapping):
            return NotImplemented
        more = other if isinstance(other, LayoutTable) else LayoutTable(other)
        return LayoutTable(
            {**self.globs, **more.globs}, (*self.strategies, *more.strategies), self.as_given or more.as_given
        )

    def __ror__(self, other: object) -> "LayoutTable":
        """Returns both, where a plain dict comes first."""
        return LayoutTable(other) | self if isinstance(other, Mapping) else NotImplemented

    def __getitem__(self, glob: str) -> Stated:
        stated: Stated = self.globs[glob]
        return stated

    def __iter__(self) -> Iterator[str]:
        return iter(self.globs)

    def __len__(self) -> int:
        return len(self.globs)

    def __bool__(self) -> bool:
        return bool(self.globs or self.strategies or self.as_given)

    @property
    def axes(self) -> Axes:
        """The mesh axes that globs and strategies name."""
        stated = (axes_of(layout) for layout in self.globs.values())
        named = [axis for axes in stated for axis in axes]
        return tuple(dict.fromkeys([*named, *(axis for each in self.strategies for axis in each.axis)]))

    def on(self, mesh: Mesh) -> dict[str, Layout | str]:
        """Returns the layouts by globs, JAX's shardings as pins on the axes of ``mesh``."""
        return {glob: pin_of(stated, mesh.names) for glob, stated in self.globs.items()}

    def resolved(self, program: TracedProgram, mesh: Mesh) -> "ResolvedTable":
        """Returns the table with strategies as pins of single arrays.

        Raises:
          PinError: a strategy does not fit the mesh or the step; all faults are listed.
        """
        if not self.strategies:
            return ResolvedTable(_overlaid(self.given, self.on(mesh)))
        arrays = Arrays.of(program, mesh)
        found: dict[int, Layout] = {}
        by: dict[str, str] = {}
        for strategy in sorted(self.strategies, key=lambda each: isinstance(each, FullySharded)):  # it has most choice
            for i, layout in strategy.pins(arrays, found).items():
                before = dict(found[i].placements) if i in found else {}
                found[i] = Layout(**{**before, **dict(layout.placements)})
                path = program.inputs[i].path
                by[path] = by.get(path, "") + f" {'and' if path in by or path in self else 'by'} md.{strategy.name}()"
        if arrays.faults:
            raise PinError(faults(f"layouts do not fit {program.name}, on mesh {mesh}:", arrays.faults))
        pins = _overlaid(self.given, {program.inputs[i].path: layout for i, layout in sorted(found.items())})
        return ResolvedTable(_overlaid(pins, self.on(mesh)), by, arrays.notes)


@dataclass(frozen=True)
class ResolvedTable:
    """A table of layouts for one traced step.

    Args:
      layouts: by globs; strategies are pins of single arrays.
      by: words that say which strategies pin an array, ``" by md.fsdp()"``, by its path.
      notes: on arrays that a strategy left alone.
    """

    layouts: Mapping[str, Layout | str]
    by: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()


def _overlaid(pins: Mapping[str, Layout | str], others: Mapping[str, Layout | str]) -> dict[str, Layout | str]:
    """Returns both tables, ``others`` last; of equal globs, it decides on the axes that it names alone."""
    found = dict(pins)
    for glob, stated in others.items():
        before = found.pop(glob, None)
        try:
            named = dict(Layout.of(stated).placements)
        except NotationError:  # which ``make_pins`` reports
            before = None
        found[glob] = stated if before is None else Layout(**{**dict(Layout.of(before).placements), **named})
    return found


@dataclass
class Arrays:
    """The inputs of a traced step as strategies see them, and what strategies say of them.

    Args:
      leaves: all inputs.
      batch: those that are no state: no result replaces them.
      state: parameters and optimizer state.
      notes: on arrays that a strategy left alone.
      faults: of strategies.
    """

    mesh: Mesh
    leaves: Sequence[Leaf]
    batch: tuple[int, ...]
    state: tuple[int, ...]
    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @staticmethod
    def of(program: TracedProgram, mesh: Mesh) -> "Arrays":
        """Returns the inputs of ``program``, by kind."""
        found = enumerate(kinds(program, replaced_inputs(program)))
        batch = tuple(i for i, kind in found if kind == ACTIVATIONS)
        others = tuple(i for i in range(len(program.inputs)) if i not in batch)
        return Arrays(mesh, program.inputs, batch, others)

    def axes(self, strategy: str, given: Axes, usual: Axes, several: bool = False) -> Axes:
        """Returns the axes of the mesh that a strategy uses: those given, or those of the usual names."""
        unknown = [axis for axis in given if axis not in self.mesh.names]
        self._fault(*(f"{strategy}: no axis {axis!r} in the mesh{nearest(axis, self.mesh.names)}" for axis in unknown))
        if given:
            return tuple(axis for axis in given if axis not in unknown)
        known = tuple(axis for axis in usual if axis in self.mesh.names)
        if not known and len(self.mesh.names) == 1:
            return self.mesh.names
        if not known:
            self._fault(f"{strategy}: the mesh has none of the axes {', '.join(usual)}; name one, axis='...'")
        return known if several else known[:1]

    def split_batch(self, strategy: str, glob: str | None, axes: Axes) -> dict[int, Layout]:
        """Returns the batch split by rows: arrays of the batch's size, which is that of the largest of them."""
        named = self.batch if glob is None else [i for i, leaf in enumerate(self.leaves) if is_named(glob, leaf)]
        arrays = [i for i in named if self.leaves[i].shape and not _is_key(self.leaves[i])]
        rows = {i: self.leaves[i].shape[0] for i in arrays}
        if not rows:
            if glob is None:
                what = "every array is replaced by a result, so there is no batch to split; name it, batch='x/**'"
            else:
                known = [leaf.path for leaf in self.leaves if leaf.shape]
                what = f"batch={glob!r} matches no input with rows{suggest(glob, known)}"
            self._fault(f"{strategy}: {what}")
        if not rows or not axes:
            return {}
        size = rows[max(rows, key=lambda i: prod(self.leaves[i].shape))]
        left = [i for i in named if rows.get(i) != size]
        self.note(f"{strategy}: not split, since they do not have the batch's {size} rows", left)
        return {i: Layout(**dict.fromkeys(axes, S(0))) for i in named if rows.get(i) == size}

    def note(self, what: str, arrays: Sequence[int]) -> None:
        """Adds a note that names the first few of these arrays, if there are any."""
        if arrays:
            more = f" and {len(arrays) - LISTED} more" if len(arrays) > LISTED else ""
            self.notes.append(f"{what}: {', '.join(self.leaves[i].path for i in arrays[:LISTED])}{more}")

    def _fault(self, *rows: str) -> None:
        """Adds faults, each once: a strategy may ask twice for the same axes."""
        self.faults += [row for row in rows if row not in self.faults]


def _is_key(leaf: Leaf) -> bool:
    return bool(dtypes.issubdtype(leaf.dtype, dtypes.extended))


# ---- Data parallelism and FSDP ---------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class DataParallel(Strategy):
    """The batch split by rows; see :func:`data_parallel`."""

    name = "data_parallel"
    batch: str | None = None

    def pins(self, arrays: Arrays, before: Mapping[int, Layout]) -> dict[int, Layout]:
        """Returns the batch's pins."""
        axes = arrays.axes(self.name, self.axis, BATCH_AXES, several=True)
        return arrays.split_batch(self.name, self.batch, axes)


def data_parallel(axis: str | Sequence[str] = (), batch: str | None = None) -> LayoutTable:
    """Return the pins of data parallelism: every array of the batch is split by rows.

    Args:
      axis: the mesh axes, major first; default are those of ``replica``, ``dp``, ``data`` and ``fsdp`` that the mesh
        has, or its only axis.
      batch: a glob over the arrays of the batch; default are those that no result replaces (in an evaluation, where
        results replace none, all arguments but the first).

    Returns:
      A value for ``layouts=``; ``|`` combines it with other strategies and with dicts of layouts by globs.

    Raises:
      ArgumentError: ``axis`` or ``batch`` is not of these kinds.

    Example:
      >>> sharded = md.parallelize(step, "data=8", md.data_parallel())
      >>> print(sharded.plan(params, batch).layout("batch"))
      data=S(0)

    Where parameters and optimizer state lie stays the planner's choice: it may well shard them.
    """
    return _table(DataParallel, axis=axis, batch=batch)


@final
@dataclass(frozen=True)
class FullySharded(Strategy):
    """The batch by rows, and state along its first long dim; see :func:`fsdp`."""

    name = "fsdp"
    batch: str | None = None
    min_size: int = MIN_SIZE

    def pins(self, arrays: Arrays, before: Mapping[int, Layout]) -> dict[int, Layout]:
        """Returns the pins of the batch and of the large arrays of state."""
        rows = arrays.axes(self.name, self.axis, BATCH_AXES, several=True)
        axes = arrays.axes(self.name, self.axis, STATE_AXES) if rows else ()
        found = arrays.split_batch(self.name, self.batch, rows)
        small = [i for i in arrays.state if i not in found and prod(arrays.leaves[i].shape) < self.min_size]
        large = [i for i in arrays.state if i not in found and i not in small]
        dims = {i: self._dim(arrays, i, axes, before.get(i, Layout())) for i in large} if axes else {}
        shards = prod(arrays.mesh.axis(axis) for axis in axes)
        whole = [i for i, dim in dims.items() if dim is None]
        arrays.note(f"fsdp: whole, since no dim divides into {shards}", whole)
        arrays.note(f"fsdp: left to the planner, as they have fewer than {self.min_size} elements", small)
        return found | {i: Layout(**dict.fromkeys(axes, S(dim))) for i, dim in dims.items() if dim is not None}

    def _dim(self, arrays: Arrays, i: int, axes: Axes, before: Layout) -> int | None:
        """Returns the first long dim that divides; one that no other strategy splits, if there is one.

        The first is contiguous in memory, so its shards are gathered without a copy. Dims shorter than an eighth of the
        longest are those of windows and stacks of layers, which loops slice.
        """
        shape, shards = arrays.leaves[i].shape, prod(arrays.mesh.axis(axis) for axis in axes)
        local = before.local_shape(shape, arrays.mesh.sizes_by_name)
        dividing = [dim for dim, size in enumerate(local) if size % shards == 0 and size]
        long = [dim for dim in dividing if SHORT * local[dim] >= max(local[other] for other in dividing)]
        return min(long, key=lambda dim: (bool(before.splitting(dim)), dim), default=None)


def fsdp(axis: str | Sequence[str] = (), min_size: int = MIN_SIZE, batch: str | None = None) -> LayoutTable:
    """Return the pins of fully sharded data parallelism (ZeRO stage 3).

    The batch is split by rows, parameters and optimizer state along the first of their long dims that divides (dims
    shorter than an eighth of the longest, such as stacks of layers, are left alone). The plan gathers each parameter
    where it is read and reduces gradients to the shards, and says when.

    Args:
      axis: the mesh axes; default for the batch is as in :func:`data_parallel`, for state ``fsdp`` or else ``data``.
      min_size: elements from which an array of state is split; a note of the plan names the others.
      batch: a glob over the arrays of the batch, as in :func:`data_parallel`.

    Returns:
      A value for ``layouts=``; ``|`` combines it with other strategies and with dicts of layouts by globs.

    Raises:
      ArgumentError: an argument is not of these kinds.

    Example:
      >>> sharded = md.parallelize(step, "data=8", md.fsdp(min_size=2**12))
      >>> print(sharded.plan(params, batch).layout("params/up"))
      data=S(0)

    Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models".
    """
    if not isinstance(min_size, int) or isinstance(min_size, bool) or min_size < 0:
        raise ArgumentError(f"fsdp: min_size: {is_a(min_size)}, not a number of elements such as 2**16")
    return _table(FullySharded, axis=axis, batch=batch, min_size=min_size)


# ---- Tensor parallelism ----------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class TensorParallel(Strategy):
    """Columns and rows of projections; see :func:`tensor_parallel`."""

    name = "tensor_parallel"
    columns: tuple[str, ...] | None = None
    rows: tuple[str, ...] | None = None

    def pins(self, arrays: Arrays, before: Mapping[int, Layout]) -> dict[int, Layout]:
        """Returns the pins of the projections in parameters and optimizer state."""
        axes = arrays.axes(self.name, self.axis, MODEL_AXES)
        wanted = {i: dim for i in arrays.state if (dim := self._dim(arrays.leaves[i])) is not None}
        self._check_matches(arrays, wanted)
        shards = prod(arrays.mesh.axis(axis) for axis in axes)
        uneven = [i for i, dim in wanted.items() if arrays.leaves[i].shape[dim] % shards]
        arrays.note(f"tensor_parallel: left to the planner, as they do not divide into {shards}", uneven)
        placed: dict[int, Placement] = {i: S(dim) for i, dim in wanted.items() if i not in uneven}
        return {i: Layout(**dict.fromkeys(axes, each)) for i, each in placed.items()}

    def _dim(self, leaf: Leaf) -> int | None:
        """Returns the dim that is split: outputs of columns, with their biases, and inputs of rows; None if neither."""
        rank = len(leaf.shape)
        if self.columns is None and self.rows is None:
            return _dim_by_name(leaf)
        if any(is_named(glob, leaf) for glob in self.columns or ()):
            return rank - 1 if rank else None
        if any(is_named(glob, leaf) for glob in self.rows or ()):
            return rank - 2 if rank > 1 else None
        return None

    def _check_matches(self, arrays: Arrays, wanted: Mapping[int, int]) -> None:
        paths = [path for i in arrays.state for path in arrays.leaves[i].paths]
        for name, globs in (("columns", self.columns), ("rows", self.rows)):
            missing = [glob for glob in globs or () if not any(matches(glob, path) for path in paths)]
            arrays.faults += [
                f"tensor_parallel: {name}={glob!r} matches no parameter{suggest(glob, paths)}" for glob in missing
            ]
        if not wanted and self.columns is None and self.rows is None:
            matrices = [arrays.leaves[i].path for i in arrays.state if len(arrays.leaves[i].shape) > 1]
            names = ", ".join([*matrices[:LISTED], "..."])
            remedy = "name them: tensor_parallel(columns='**/up/kernel', rows='**/down/kernel')"
            arrays.faults.append(f"tensor_parallel: no parameter has a projection's usual name ({names}); {remedy}")


def _dim_by_name(leaf: Leaf) -> int | None:
    """Returns the dim of a projection with a usual name that tensor parallelism splits."""
    parts, rank = split_path(leaf.path), len(leaf.shape)
    name = next((part for part in reversed(parts) if part in COLUMNS or part in ROWS), None)
    is_bias = parts[-1] in ("bias", "b")
    if name is None or not rank:
        return None
    if name in HEADS and rank > (1 if is_bias else 2):
        return rank - 2
    if name in COLUMNS:
        return rank - 1
    if is_bias or rank < 2:
        return None
    return rank - 3 if name in JOINED and rank > 2 else rank - 2


def tensor_parallel(
    axis: str | Sequence[str] = (),
    columns: str | Sequence[str] | None = None,
    rows: str | Sequence[str] | None = None,
) -> LayoutTable:
    """Return the pins of tensor parallelism: projections split by outputs (columns), the next by inputs (rows).

    Between the two, activations are split over the axis without communication; one sum follows the second product.

    Args:
      axis: the mesh axis; default is ``model``, ``tensor``, ``tp`` or ``mp``, or the mesh's only axis.
      columns: globs over parameters ``[..., in, out]`` to be split by ``out``, and over their biases. Optimizer state
        of the same paths is split alike where the glob starts with ``**/``.
      rows: globs over parameters ``[..., in, out]`` to be split by ``in``. Without ``columns`` and ``rows``,
        projections are known by the usual names of attention and feed-forward weights (``q_proj``, ``up``, ``wo``).

    Returns:
      A value for ``layouts=``; ``|`` combines it with other strategies and with dicts of layouts by globs.

    Raises:
      ArgumentError: an argument is not of these kinds.

    Example:
      >>> layouts = md.data_parallel() | md.tensor_parallel(columns="**/up", rows="**/down")
      >>> plan = md.parallelize(step, "data=4,model=2", layouts).plan(params, batch)
      >>> print(plan.layout("params/up").on("model"), plan.layout("params/down").on("model"))
      S(1) S(0)

    Source: Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models".
    """
    named: dict[str, Any] = {"columns": columns, "rows": rows}
    globs = {key: None if value is None else _texts("tensor_parallel", key, value) for key, value in named.items()}
    return _table(TensorParallel, axis=axis, **globs)


# ---- Arguments -------------------------------------------------------------------------------------------------------


def _table(strategy: type[Strategy], axis: Any, **given: Any) -> LayoutTable:
    if given.get("batch") is not None and not isinstance(given["batch"], str):
        raise ArgumentError(f"{strategy.name}: batch: {is_a(given['batch'])}, not a glob such as 'batch/**'")
    return LayoutTable(strategies=(strategy(axis=_texts(strategy.name, "axis", axis), **given),))


def _texts(name: str, what: str, given: Any) -> tuple[str, ...]:
    """Returns one text, or several, as a tuple."""
    texts = (given,) if isinstance(given, str) else given
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise ArgumentError(f"{name}: {what}: {is_a(given)}, neither text nor a sequence of texts")
    return tuple(texts)
