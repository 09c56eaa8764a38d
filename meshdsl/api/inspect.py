"""``inspect``: what a program that XLA has partitioned communicates, on the lines of its source, in axes of its mesh.

    found = md.inspect(jitted, state, batch)      # compiled as the call would compile it; nothing runs
    print(found)                                  # every collective: kind, axes, bytes, iterations, line
    print(found.compare())                        # beside the best plan of the same step

It takes what others write: ``jax.jit`` with shardings, explicit axes, ``shard_map``. The compiled program is read, so
what is reported is what runs. The best plan is one between the same inputs and outputs, free in between: constraints
inside the step are ignored.
"""

import inspect as python_inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import groupby
from linecache import getline
from math import prod
from numbers import Real
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_leaves_with_path

from meshdsl.api.ambient import with_auto_axes
from meshdsl.api.sharded import Sharded, parallelize
from meshdsl.api.stages import CallStages
from meshdsl.errors import ArgumentError, CheckError, MeshDSLError, is_a
from meshdsl.ir.graph import Source, Value, walk
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.topology import Topology
from meshdsl.lowering.aot_targets import parse_target
from meshdsl.lowering.elsewhere import compiled_elsewhere
from meshdsl.lowering.hlo.collectives import CompiledCollective, SentTensor, collectives_of_module, scope_in
from meshdsl.lowering.hlo.flops import product_flops
from meshdsl.lowering.hlo.parse import parse_module
from meshdsl.lowering.hlo.schedule import ScheduledCollective, scheduled_collectives
from meshdsl.lowering.hlo.source import InstructionSources
from meshdsl.lowering.interpreter import run_graph
from meshdsl.lowering.partitioner import CompiledModules, compiled_modules
from meshdsl.lowering.reference import WholeTarget, is_divided
from meshdsl.lowering.simulation.check import LIMIT, ProgramCheck, TypedValue, check_program, typed_values
from meshdsl.lowering.verify import compiled_bytes
from meshdsl.pins import AS_GIVEN
from meshdsl.plan.budget import Kinds, check_budget
from meshdsl.plan.op_times import plan_flops
from meshdsl.plan.plan import Plan
from meshdsl.plan.reasons import SourceNames
from meshdsl.shardings import StatedMesh, axes_of, mesh_of, partition_spec, topology_at_hand
from meshdsl.util.text import bytes_text, percent_text, seconds_text, table

_SHOWN = 12  # rows of a printed table
_MOST = 0.9  # part of the excess that the lines with a remedy make up together
_LINES = 5  # of them, at most
_STATEMENTS = 3  # constraints of a line that are shown
_KINDS = 3  # kinds of operations in one row of types
_WIDE = 60  # characters of a source line


class OneDeviceError(ArgumentError):
    """A function runs on one device, so that there is nothing to inspect."""


# ---- What a compiled program sends -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class InspectedCollective:
    """A tensor that a compiled program sends by a collective.

    Args:
      kind: of the collective, as plans name it.
      axes: mesh axes that it runs over; empty if its groups of devices are no axes.
      group: devices in a group.
      bytes: bytes that one device sends per iteration.
      trips: iterations per step; those of a loop whose number depends on data count once.
      estimated: whether ``trips`` is such a guess.
      seconds: predicted seconds per iteration under the topology of the mesh; a combined collective's are divided
        among its tensors by their bytes.
      covered: seconds of these that are hidden behind products, in the schedule of a compiler that states one (of TPUs
        and GPUs); 0 if the collective is synchronous.
      phase: forward or backward, by jax's name stack; empty for what is neither.
      place: line of the user's program.
      source: its name, ``file.py:12``.
      text: what it reads.
      tensor: type of one device's result, ``float32[8,64]``.
      note: what is wasteful about it; empty if nothing is known to be.
    """

    kind: str
    axes: tuple[str, ...]
    group: int
    bytes: int
    trips: int
    estimated: bool
    seconds: float
    covered: float
    phase: str
    place: Source
    source: str
    text: str
    tensor: str
    note: str = ""

    @property
    def over(self) -> str:
        """The axes, or the size of the groups."""
        return ",".join(self.axes) if self.axes else f"groups of {self.group}"


@dataclass(frozen=True, eq=False)
class Inspection:
    """A compiled program, as ``inspect`` has read it; ``print`` shows all collectives.

    Args:
      name: of the step.
      mesh: with the names of its axes, and the topology that seconds are predicted for.
      collectives: every tensor sent, in program order.
      memory: bytes of one device: arguments, results and temporary values.
      flops: of the products and convolutions of one device.
      target: the absent devices and the compiler, if it was compiled for any.

    Example:
      >>> mesh = jax.make_mesh((8,), ("data",))
      >>> rows = jax.device_put(jnp.ones((64, 8)), jax.NamedSharding(mesh, jax.P("data")))
      >>> found = md.inspect(jax.jit(lambda x: x.sum(0)), rows)
      >>> [(c.kind, c.axes, c.bytes) for c in found.collectives]
      [('all-reduce', ('data',), 56)]
    """

    name: str
    mesh: Mesh
    collectives: tuple[InspectedCollective, ...]
    memory: int
    flops: int
    _step: "_TracedStep"
    target: str = ""

    @property
    def bytes(self) -> int:
        """Bytes that one device sends in one step."""
        return sum(c.bytes * c.trips for c in self.collectives)

    @property
    def seconds(self) -> float:
        """Predicted seconds of all collectives of one step, one after the other."""
        return sum(c.seconds * c.trips for c in self.collectives)

    @property
    def exposed_seconds(self) -> float:
        """Predicted seconds of one step that no product hides."""
        return sum((c.seconds - c.covered) * c.trips for c in self.collectives)

    def assert_at_most(self, bytes: float | None = None, kinds: Kinds | None = None) -> None:
        """Raise BudgetError, an AssertionError, if the program communicates more.

        Args:
          bytes: limit on the bytes that one device sends in one step.
          kinds: limits on the tensors that each kind of collective sends, ``{"all-reduce": 2}``, or the kinds that may
            occur. A collective that the compiler has combined sends several.
        """
        check_budget(f"the compiled program of {self.name}", self.collectives, bytes, kinds)

    def compare(self) -> "PlanComparison":
        """Plan the same step between the same inputs and outputs, and return both sides.

        Raises:
          ArgumentError: the step cannot be planned; the message says why.
        """
        return self._comparison

    @cached_property
    def _comparison(self) -> "PlanComparison":
        sharded, args = self._step.planned(self.mesh)
        try:
            plan = sharded.plan(*args)
        except MeshDSLError as error:
            raise ArgumentError(f"{self.name} cannot be planned to compare with: {error}") from error
        return PlanComparison(self, plan, self._step, sharded.stages(*args))

    def check(self, inputs: int = 2, limit: float = LIMIT, raises: bool = True) -> ProgramCheck:
        """Run the compiled program on simulated devices beside the step, and return which results are the step's.

        The program is compiled once more, and read before and behind the partitioner, and as it runs. Behind the
        partitioner numbers are exact, elements of a prime field, so that a missing or doubled sum shows wherever it is
        read; optimized programs are run in float64. No device runs anything. Of a program for absent devices, what runs
        is checked.

        Args:
          inputs: random arguments that are tried.
          limit: elements that may be computed for each of them; 1e9 take about a minute.
          raises: whether a wrong result is an error.

        Raises:
          CheckError: a result is wrong; the message names the operation, its mesh axes, its line, and what it should
            read. Or no result could be followed, or the program is too large.
          DeviceError: the compiler does not write its program before and behind the partitioner.

        Example:
          >>> mesh = jax.make_mesh((8,), ("data",))
          >>> rows = jax.device_put(jnp.ones((64, 8)), jax.NamedSharding(mesh, jax.P("data")))
          >>> md.inspect(jax.jit(lambda x: x.sum(0)), rows).check().agreeing
          ('the result',)
        """
        _check_positive("inputs", inputs, int)
        _check_positive("limit", limit, Real)
        leaves = tree_leaves_with_path(self._step.traced.out_info)
        paths = [keystr(path, simple=True, separator="/") or "the result" for path, _ in leaves]
        modules = self._step.modules
        if self.target:  # whose compiler shows what runs, but not what its partitioner makes
            modules = replace(modules, partitioned="", optimized=self._step.compiled.as_text() or "")
        check = check_program(self.name, modules, self.mesh, paths, inputs, limit)
        if raises and not (check.equal and check.agreeing):
            raise CheckError(str(check))
        return check

    def types(self, limit: float = LIMIT) -> "ValueTypes":
        """Run the partitioned program on simulated devices, and return how every value of the step lies.

        ``S(dim)``, ``B`` or ``P`` per mesh axis: split, the same, or a partial sum. They are observed, in exact
        arithmetic on random arguments, so they hold for what the partitioner made, whatever it was told. Of a program
        for absent devices, they are those of the partitioner of the devices at hand.

        Args:
          limit: elements that may be computed; 1e9 take about a minute.

        Raises:
          CheckError: the program is too large.
          DeviceError: the compiler does not write its program before and behind the partitioner.

        Example:
          >>> mesh = jax.make_mesh((8,), ("data",))
          >>> rows = jax.device_put(jnp.ones((64, 8)), jax.NamedSharding(mesh, jax.P("data")))
          >>> found = md.inspect(jax.jit(lambda x: jnp.tanh(x).sum(0)), rows).types()
          >>> [(x.operation, str(x.layout)) for x in found.values]
          [('tanh', 'data=S(0)'), ('reduce', 'data=P'), ('all-reduce', 'data=B')]
        """
        _check_positive("limit", limit, Real)
        values = typed_values(self.name, self._step.modules, self.mesh, limit)
        return ValueTypes(self.name, self.mesh, tuple(values))

    @property
    def facts(self) -> dict[str, Any]:
        """All figures as plain values, as ``meshdsl inspect --json`` prints them."""
        rows = [{name: x for name, x in asdict(c).items() if name != "place"} for c in self.collectives]
        totals = {
            "bytes": self.bytes,
            "seconds": self.seconds,
            "exposed_seconds": self.exposed_seconds,
            "memory": self.memory,
            "flops": self.flops,
        }
        return {"name": self.name, "mesh": str(self.mesh), "topology": self.mesh.topology.name, **totals} | {
            "collectives": rows
        }

    def __str__(self) -> str:
        compiler = f"compiled for {self.target}" if self.target else "compiled by XLA"
        title = f"{self.name} on mesh {self.mesh}, {compiler}; seconds of topology {self.mesh.topology.name}"
        counted = f"{len(self.collectives)} tensor{'s' * (len(self.collectives) != 1)}"
        sums = [
            f"sends {bytes_text(self.bytes)} per device and step in {counted}, {seconds_text(self.seconds)}, of which "
            f"{seconds_text(self.exposed_seconds)} have no product beside them",
            f"memory {bytes_text(self.memory)} per device, products {self.flops:.4g} FLOPs per device",
        ]
        return "\n".join([title, *sums, *(("", *table(self._rows())) if self.collectives else ())])

    def _rows(self) -> list[list[str]]:
        """A row per kind, axes, line and tensor, those that send most first."""
        alike: dict[tuple[str, ...], list[InspectedCollective]] = defaultdict(list)
        for c in self.collectives:
            alike[c.source, c.kind, c.over, c.tensor, c.phase].append(c)
        order = sorted(alike.values(), key=lambda found: -sum(c.bytes * c.trips for c in found))
        rows = [["collective", "axes", "bytes", "sent", "seconds", "exposed", "tensor", "phase", "line", ""]]
        for found in order[:_SHOWN]:
            c, runs = found[0], sum(each.trips for each in found)
            sent, spent = (sum(getattr(x, name) * x.trips for x in found) for name in ("bytes", "seconds"))
            exposed = spent - sum(x.covered * x.trips for x in found)
            mark = "?" if c.estimated else ""
            where = f"{c.source}  {_cut(c.text)}".rstrip()
            rows.append(
                [
                    c.kind,
                    c.over,
                    bytes_text(sent),
                    f"{runs}{mark}",
                    seconds_text(spent),
                    seconds_text(exposed),
                    c.tensor,
                    c.phase,
                    where,
                    c.note,
                ]
            )
        if len(order) > _SHOWN:
            rest = sum(c.bytes * c.trips for found in order[_SHOWN:] for c in found)
            rows.append([f"{len(order) - _SHOWN} more", "", bytes_text(rest), *[""] * 7])
        return rows


@dataclass(frozen=True)
class ValueTypes:
    """How the values of a partitioned program lie; ``print`` shows them line by line.

    Args:
      name: of the step. mesh: names the axes.
      values: in program order, those of loops once.
    """

    name: str
    mesh: Mesh
    values: tuple[TypedValue, ...]

    @property
    def facts(self) -> list[dict[str, str]]:
        """All values as plain values, as ``meshdsl inspect --types --json`` prints them."""
        names = SourceNames(x.place for x in self.values)
        return [
            {
                "operation": x.operation,
                "tensor": x.tensor,
                "layout": "" if x.layout is None else str(x.layout),
                "source": names.of(x.place),
            }
            for x in self.values
        ]

    def __str__(self) -> str:
        names = SourceNames(each.place for each in self.values)
        rows = [["operations", "of one device", "layout", "line"]]
        for (tensor, layout, place), alike in groupby(self.values, lambda x: (x.tensor, x.layout, x.place)):
            operations = list(dict.fromkeys(x.operation for x in alike))
            more = f" and {len(operations) - _KINDS} more" if len(operations) > _KINDS else ""
            text = getline(place.file, place.line).strip() if place.file else ""
            line = f"{names.of(place)}  {_cut(text)}".rstrip()
            shown = ", ".join(operations[:_KINDS])
            rows.append([f"{shown}{more}", tensor, "varying" if layout is None else str(layout), line])
        return "\n".join([f"{self.name} on mesh {self.mesh}, behind the partitioner", *table(rows)])


def inspect(
    step: Callable[..., Any],
    *args: Any,
    mesh: StatedMesh | None = None,
    topology: Topology | str | None = None,
    target: str | None = None,
    **kwargs: Any,
) -> Inspection:
    """Compile a jitted function for these arguments, and return every collective that it runs.

    Args:
      step: what ``jax.jit`` returned, whatever places its arrays: ``in_shardings``, placed arguments, an ambient mesh,
        ``with_sharding_constraint``, explicit axes, ``jax.shard_map``.
      *args: its arguments: placed arrays, or ``jax.ShapeDtypeStruct`` with shardings; keywords as well. Nothing is run
        or donated.
      mesh: names the axes; default is the mesh of the program's inputs and outputs.
      topology: that seconds are predicted for; default is that of the target, or of the devices at hand.
      target: absent devices to compile for in place of those of the mesh, such as ``"tpu-v5e:2x4"`` or
        ``"dgx-h100:8"``; as many (virtual CPU devices will do). Meshes inside the step are replaced by one of them.

    Returns:
      The collectives, totals, memory and FLOPs. ``compare`` sets the best plan of the same step beside it.

    Raises:
      ArgumentError: ``step`` is not jitted, or nothing that goes in or out lies on a mesh.
      DeviceError: the target is unknown, has another number of devices, or its compiler is not installed.

    Example:
      >>> mesh = jax.make_mesh((8,), ("data",))
      >>> rows = jax.device_put(jnp.ones((64, 8)), jax.NamedSharding(mesh, jax.P("data")))
      >>> md.inspect(jax.jit(lambda x: x.sum()), rows).bytes
      7

    XLA's partitioner (GSPMD, Xu et al. 2021; Shardy) leaves no trace of why it sends something; the lines are those of
    the operations that the collectives serve.
    """
    absent = None if target is None else parse_target(target)
    traced = _TracedStep.of(step, args, kwargs)
    over = mesh_of(traced.mesh if mesh is None else mesh)
    if topology is None and absent is not None:
        topology = absent.preset
    if topology is not None or not over.states_topology:
        over = Mesh(topology=topology or topology_at_hand(over).topology, **over.sizes_by_name)
    if over.size != traced.size:
        raise ArgumentError(f"mesh={over} has {over.size} devices, and {traced.name} runs on {traced.size}")
    if absent is None:
        return _inspection(traced, over)
    compiled = compiled_elsewhere(traced.traced, traced.compiled, absent.devices(over))
    return replace(_inspection(replace(traced, compiled=compiled), over), target=f"{absent} by {absent.compiler}")


def _inspection(traced: "_TracedStep", mesh: Mesh) -> Inspection:
    text = traced.compiled.as_text() or ""
    module = parse_module(text)
    lines = InstructionSources(text, module)
    sent = [
        (found, tensor, lines.metadata(found.sent.name, tensor.about))
        for found in scheduled_collectives(module, mesh)
        for tensor in found.sent.tensors
    ]
    pairs = [(found, tensor, scope_in(about) or found.sent.scope, lines.of(about)) for found, tensor, about in sent]
    names = SourceNames(source for *_, source in pairs)
    found = tuple(_inspected(*pair, names, traced.split_shapes) for pair in pairs)
    return Inspection(traced.name, mesh, found, compiled_bytes(traced.compiled), product_flops(module), traced)


def _inspected(
    found: ScheduledCollective,
    tensor: SentTensor,
    scope: str,
    source: Source,
    names: SourceNames,
    split: Mapping[tuple[int, ...], set[str]],
) -> InspectedCollective:
    c = found.sent
    share = float(tensor.bytes / c.bytes) if c.bytes else 0.0
    return InspectedCollective(
        kind=c.kind,
        axes=c.axes or (),
        group=c.group,
        bytes=round(tensor.bytes),
        trips=c.trips,
        estimated=not c.known,
        seconds=found.seconds * share,
        covered=found.covered * share,
        phase="backward" if "transpose(" in scope else "forward" if "jvp(" in scope else "",
        place=source,
        source=names.of(source),
        text=getline(source.file, source.line).strip() if source.file else "",
        tensor=f"{tensor.dtype}[{','.join(map(str, tensor.dims))}]",
        note=_waste(c, bool(split.get(tensor.dims, set()) & set(c.axes or ())), scope),
    )


def _waste(c: CompiledCollective, is_argument: bool, scope: str) -> str:
    """What a reader should know of a collective at once.

    Args:
      is_argument: whether the tensor is as large as a whole argument that lies split over an axis of the collective.
    """
    if c.kind == "all-gather" and is_argument:
        return f"gathers a whole argument{f', {c.trips} times' if c.trips > 1 else ''}"
    if c.kind == "all-reduce" and c.trips > 1 and "transpose(" in scope:
        return f"reduces in every one of {c.trips} iterations"
    if c.kind == "all-reduce" and is_argument:
        return "all-reduces what lies split: a reduce-scatter would do"
    return ""


def _cut(text: str) -> str:
    return text if len(text) <= _WIDE else f"{text[: _WIDE - 3]}..."


# ---- The step, traced and compiled -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _TracedStep:
    """A jitted function, traced and compiled for some arguments."""

    name: str
    traced: Any
    lowered: Any
    compiled: Any
    parameters: tuple[str, ...]

    @classmethod
    def of(cls, step: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "_TracedStep":
        if isinstance(step, Sharded):
            raise ArgumentError("inspect reads programs of jax.jit; of this one, plan and verify say the same and more")
        if not hasattr(step, "trace") or not hasattr(step, "lower"):
            kind = getattr(step, "__name__", "") or is_a(step)
            raise ArgumentError(f"step={kind} is not jitted: give jax.jit({kind}, in_shardings=...), as it is called")
        traced = step.trace(*args, **kwargs)
        try:
            names = tuple(python_inspect.signature(step).parameters)
        except (TypeError, ValueError):
            names = ()
        if len(traced.args_info[0]) < len(args):  # static ones are left out, and jax does not say which
            names = ()
        lowered = traced.lower()
        return cls(traced.fun_name, traced, lowered, lowered.compile(), names)

    @cached_property
    def modules(self) -> CompiledModules:
        """The program before and after partitioning, and as it runs; it is compiled once more for them."""
        return compiled_modules(self.lowered)

    @cached_property
    def shapes(self) -> list[Any]:
        """The arguments, flat, with the shardings in which they are compiled."""
        infos = jax.tree.leaves(self.traced.args_info)
        places = jax.tree.leaves(self.compiled.input_shardings, is_leaf=lambda x: x is None)
        return [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at if isinstance(at, NamedSharding) else None)
            for x, at in zip(infos, places, strict=True)
        ]

    @cached_property
    def split_shapes(self) -> dict[tuple[int, ...], set[str]]:
        """The axes over which arguments of several dims lie split, by their whole shapes."""
        found = defaultdict[tuple[int, ...], set[str]](set)
        for x in self.shapes:
            if len(x.shape) > 1 and x.sharding is not None:
                found[x.shape].update(axes_of(x.sharding))
        return found

    @property
    def mesh(self) -> Any:
        """The mesh of the first argument or result that lies on one of several devices."""
        meshes = [at.mesh for at in self._ends if isinstance(at, NamedSharding) and at.mesh.size > 1]
        if not meshes:
            raise OneDeviceError(
                f"{self.name}: no argument and no result lies on a mesh of several devices, so it runs on one; place "
                "its arguments by jax.device_put(x, NamedSharding(mesh, spec)), or state in_shardings="
            )
        return meshes[0]

    @property
    def size(self) -> int:
        """The number of devices."""
        return max((at.num_devices for at in self._ends), default=1)

    @property
    def _ends(self) -> list[Any]:
        """The shardings of arguments and results."""
        return jax.tree.leaves((self.compiled.input_shardings, self.compiled.output_shardings))

    def planned(self, mesh: Mesh) -> tuple[Sharded[..., Any], tuple[Any, ...]]:
        """The same step to plan, free between the inputs and outputs as they lie, and its arguments."""
        given, keywords = jax.tree.unflatten(jax.tree.structure(self.traced.args_info), self.shapes)
        names = [name for name in self.parameters if name not in keywords]
        names += [f"argument_{i}" for i in range(len(names), len(given))]
        arguments = {**dict(zip(names, given, strict=False)), **dict(sorted(keywords.items()))}
        run, out = jaxpr_as_fun(self.traced.jaxpr), jax.tree.structure(self.traced.out_info)

        def step(*args: Any) -> Any:
            return jax.tree.unflatten(out, run(*jax.tree.leaves(args)))

        step.__name__ = self.name
        kind = python_inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [python_inspect.Parameter(name, kind) for name in arguments]
        step.__signature__ = python_inspect.Signature(parameters)  # type: ignore[attr-defined]
        args = tuple(arguments.values())
        free = parallelize(step, mesh, AS_GIVEN, constraints="ignore")
        paths = [leaf.path for leaf in free.stages(*args).traced.outputs]
        ends = jax.tree.leaves(self.compiled.output_shardings)
        pins = {path: at for path, at in zip(paths, ends, strict=True) if isinstance(at, NamedSharding)}
        return parallelize(step, mesh, AS_GIVEN, outputs=pins, constraints="ignore"), args


# ---- Beside the best plan --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WastefulLine:
    """A line of the source on which a program sends more than the plan does.

    Args:
      source: the line, ``file.py:12``. text: what it reads.
      bytes, planned: bytes that one device sends for it per step, in the program and in the plan.
      instead: what the plan sends for it.
      statements: layouts of the values that are computed there, as constraints, in words of jax.
    """

    source: str
    text: str
    bytes: int
    planned: int
    instead: str
    statements: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class PlanComparison:
    """A program of the partitioner beside the best plan of the same step; ``print`` shows both.

    Args:
      inspection: of the program.
      plan: between the same inputs and outputs.

    Example:
      >>> mesh = jax.make_mesh((8,), ("data",))
      >>> rows = jax.device_put(jnp.ones((64, 8)), jax.NamedSharding(mesh, jax.P("data")))
      >>> md.inspect(jax.jit(lambda x: x.sum(0)), rows).compare().ratio
      1.0
    """

    inspection: Inspection
    plan: Plan
    _step: _TracedStep
    _stages: CallStages

    @property
    def ratio(self) -> float:
        """Bytes of the program by those of the plan; infinite if the plan sends none."""
        sent, planned = self.inspection.bytes, self.plan.bytes
        return sent / planned if planned else float("inf") if sent else 1.0

    @cached_property
    def lines(self) -> tuple[WastefulLine, ...]:
        """The lines on which the program sends more than the plan, by the excess."""
        sent, planned = defaultdict[str, int](int), defaultdict[str, int](int)
        instead: dict[str, list[str]] = {}
        texts: dict[str, str] = {}
        for c in self.inspection.collectives:
            source = self._names.of(c.place) if c.place.file in self._names.files else c.source
            sent[source] += c.bytes * c.trips
            texts[source] = c.text
        for p in self.plan.collectives:
            planned[p.source] += p.bytes * p.trips
            instead.setdefault(p.source, []).append(f"{p.kind}({','.join(p.axes)}) of {p.value}")
        order = sorted(sent, key=lambda source: planned[source] - sent[source])
        return tuple(
            WastefulLine(
                source,
                texts[source],
                sent[source],
                planned[source],
                _listed(instead.get(source, ())),
                tuple(dict.fromkeys(self._statements(source))),
            )
            for source in order
            if sent[source] > planned[source]
        )

    @property
    def worst(self) -> tuple[WastefulLine, ...]:
        """The lines that make up most of the excess."""
        excess, found = sum(line.bytes - line.planned for line in self.lines), list[WastefulLine]()
        for line in self.lines[:_LINES]:
            if sum(each.bytes - each.planned for each in found) < _MOST * excess:
                found.append(line)
        return tuple(found)

    @cached_property
    def constrained_bytes(self) -> int | None:
        """Bytes that XLA's partitioner sends with the plan's layouts as constraints on the worst lines.

        The step is compiled with ``jax.lax.with_sharding_constraint`` on every value computed on these lines, in the
        plan's layout unless that is partial. None if it has a ``jax.shard_map`` or other names of axes, or if the
        compiler fails on it.
        """
        if not self.worst:
            return self.inspection.bytes
        mesh, graph = with_auto_axes(self._step.mesh), self._stages.planned.program.graph
        if is_divided(graph) or set(mesh.axis_names) != set(self.plan.mesh.names):
            return None

        def here(at: Any) -> NamedSharding | None:
            return NamedSharding(mesh, at.spec) if isinstance(at, NamedSharding) else None

        sources = {line.source for line in self.worst}
        places = {value.id: NamedSharding(mesh, spec) for value, spec in self._planned_on(sources)}
        leaves = self._step.shapes
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here(x.sharding)) for x in leaves]
        function = jax.jit(
            lambda *arrays: tuple(run_graph(graph, arrays, _ConstrainedTarget(places))),
            out_shardings=tuple(map(here, jax.tree.leaves(self._step.compiled.output_shardings))),
        )
        try:
            text = function.lower(*shapes).compile().as_text() or ""
        except (jax.errors.JaxRuntimeError, ValueError):
            return None
        found = collectives_of_module(parse_module(text), self.plan.mesh)
        return round(sum(c.bytes * c.trips for c in found))

    @property
    def facts(self) -> dict[str, Any]:
        """All figures as plain values."""
        lines = [asdict(line) for line in self.lines]
        totals = {"bytes": self.plan.bytes, "seconds": self.plan.seconds, "gap": self.plan.gap}
        return {"plan": totals, "ratio": self.ratio, "constrained_bytes": self.constrained_bytes, "lines": lines}

    def __str__(self) -> str:
        return "\n".join(self._text())

    def _text(self) -> Iterator[str]:
        sent, plan = self.inspection, self.plan
        yield f"{sent.name} on mesh {sent.mesh}: the program of jax.jit beside the best plan of the same step"
        rows = [["", "bytes per device and step", "seconds of collectives", "product FLOPs per device"]]
        planned = sum(c.seconds * c.trips for c in plan.collectives)
        flops = plan_flops(self._stages.planned.program, plan.solution)
        rows.append(["jax.jit", bytes_text(sent.bytes), seconds_text(sent.seconds), f"{sent.flops:.4g}"])
        rows.append(["plan", bytes_text(plan.bytes), seconds_text(planned), f"{flops:.4g}"])
        yield from table(rows)
        if not self.lines:
            yield "no line sends more than in the plan"
            return
        if not plan.bytes:
            yield "the plan sends nothing"
        elif self.ratio >= 1:
            yield f"it sends {self.ratio:.2f} times the bytes of the plan"
        else:
            yield f"it sends {self.ratio:.2f} times the bytes of the plan, which has the least predicted step time"
        excess = sum(line.bytes - line.planned for line in self.lines)
        part = sum(line.bytes - line.planned for line in self.worst) / excess
        count = len(self.worst)
        yield f"{percent_text(part)} of the excess comes from {f'{count} lines' if count > 1 else 'one line'}:"
        for line in self.worst:
            yield f"  {line.source}  {_cut(line.text)}" if line.source != "?" else "  operations without a line"
            yield f"    sends {bytes_text(line.bytes)}; the plan {bytes_text(line.planned)}{line.instead}"
            yield from (f"    {statement}" for statement in line.statements[:_STATEMENTS])
            if len(line.statements) > _STATEMENTS:
                yield f"    and {len(line.statements) - _STATEMENTS} more values of this line"
        after = self.constrained_bytes
        if after is not None and any(line.statements for line in self.worst):
            helps = after < sent.bytes
            found = f"jax.jit sends {bytes_text(after)} (compiled){'' if helps else ': no fewer'}"
            yield f"with all values of these lines constrained to the plan's layouts, {found}"

    def _statements(self, source: str) -> Iterator[str]:
        explicit = AxisType.Explicit in self._step.mesh.axis_types
        call = "jax.sharding.reshard" if explicit else "jax.lax.with_sharding_constraint"
        for value, spec in sorted(self._planned_on({source}), key=lambda each: -prod(each[0].shape)):
            dims = ",".join(map(str, value.shape))
            yield f"{value.dtype}[{dims}] of {source}: {call}(x, {_spec_text(spec)})"

    def _planned_on(self, sources: set[str]) -> Iterator[tuple[Value, PartitionSpec]]:
        """The values that the step computes on these lines, with their planned layouts, unless these are partial."""
        graph, layouts = self._stages.planned.program.graph, self.plan.solution.layouts
        for one in (graph, *(body for _, op in walk(graph) for body in op.bodies)):
            for op in one.ops[:-1]:
                if self._names.of(op.source) in sources and not op.bodies:
                    at = ((value, layouts[value.id]) for value in op.outputs if len(value.shape) > 1)
                    yield from ((value, partition_spec(x, len(value.shape))) for value, x in at if not x.partial())

    @cached_property
    def _names(self) -> SourceNames:
        return SourceNames(op.source for _, op in walk(self._stages.planned.program.graph))


def _listed(items: Sequence[str]) -> str:
    shown = list(dict.fromkeys(items))
    more = f" and {len(shown) - 2} more" if len(shown) > 2 else ""
    return f": {', '.join(shown[:2])}{more}" if shown else ""


def _spec_text(spec: Any) -> str:
    return f"P({', '.join(map(repr, spec.partitions))})"


class _ConstrainedTarget(WholeTarget):
    """Whole arrays, some of which are constrained to a sharding."""

    def __init__(self, places: Mapping[int, NamedSharding]) -> None:
        super().__init__({})
        self._places = places

    def inner(self) -> "_ConstrainedTarget":
        """Returns an empty environment under the same constraints."""
        return _ConstrainedTarget(self._places)

    def define(self, value: Value, array: jax.Array) -> None:
        """Stores the array, constrained."""
        at = self._places.get(value.id)
        super().define(value, array if at is None else jax.lax.with_sharding_constraint(array, at))


def _check_positive(name: str, given: object, kind: type) -> None:
    """Raises ArgumentError unless an argument is a number of a kind above 0."""
    if isinstance(given, bool) or not isinstance(given, kind) or not given > 0:  # type: ignore[operator]
        raise ArgumentError(f"{name}={given!r} is no {'whole number' if kind is int else 'number'} above 0")
