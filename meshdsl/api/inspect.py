"""``inspect``: what a program that XLA has partitioned communicates, on the lines of its source, in axes of its mesh.

    found = md.inspect(jitted, state, batch)      # compiled as the call would compile it; nothing runs
    print(found)                                  # every collective: kind, axes, bytes, iterations, line
    print(found.compare())                        # beside the best plan of the same step
    found.save("sent.json")                       # a plan file: md.load_plan, diff, report and golden_plan take it

It takes what others write: ``jax.jit`` with shardings, explicit axes, ``shard_map``. The compiled program is read, so
what is reported is what runs. The best plan is one between the same inputs and outputs, free in between: constraints
inside the step are ignored.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from hashlib import sha256
from itertools import groupby
from linecache import getline
from numbers import Real
from os import PathLike
from typing import Any

import jax
from jax.tree_util import keystr, tree_leaves_with_path

from meshdsl.api.comparison import PlanComparison
from meshdsl.api.inspected import InspectedCollective, inspected_collective, shortened_line
from meshdsl.api.traced_step import TracedStep
from meshdsl.errors import ArgumentError, CheckError
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.topology import Topology
from meshdsl.lowering.aot_targets import parse_target
from meshdsl.lowering.elsewhere import compiled_elsewhere
from meshdsl.lowering.hlo.collectives import scope_in
from meshdsl.lowering.hlo.dataflow import Dataflow
from meshdsl.lowering.hlo.flops import product_flops
from meshdsl.lowering.hlo.parse import parse_module
from meshdsl.lowering.hlo.schedule import read_schedule
from meshdsl.lowering.hlo.source import InstructionSources
from meshdsl.lowering.simulation.check import LIMIT, ProgramCheck, TypedValue, check_program, typed_values
from meshdsl.lowering.verify import compiled_bytes
from meshdsl.plan.budget import Kinds, check_budget
from meshdsl.plan.compiled import compiled_plan
from meshdsl.plan.diff import PlanDiff
from meshdsl.plan.plan import Plan
from meshdsl.plan.reasons import SourceNames
from meshdsl.plan.types import Collective, Line
from meshdsl.shardings import StatedMesh, mesh_of, topology_at_hand
from meshdsl.util.text import bytes_text, count_text, seconds_text, table

_SHOWN = 12  # rows of a printed table
_KINDS = 3  # kinds of operations in one row of types


# ---- What a compiled program sends -----------------------------------------------------------------------------------


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
    _step: TracedStep
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

    @cached_property
    def record(self) -> Plan:
        """The communication in the form of a plan, which ``save``, ``diff`` and ``report`` are of; it cannot be run."""
        lines: dict[str, Line] = {}
        for c in sorted(self.collectives, key=lambda c: (c.place.file, c.place.line)):
            lines.setdefault(c.source, Line(c.source, c.place.function, c.text))
        return compiled_plan(
            self.name,
            self.mesh,
            self.target or "XLA",
            sha256(self._step.lowered.as_text().encode()).hexdigest(),
            jax.__version__,
            self._step.arrays(self.mesh),
            tuple(map(_recorded, self.collectives)),
            [(c.seconds - c.covered) * c.trips for c in self.collectives],
            lines,
            self.memory,
            float(self.flops * self.mesh.size),
        )

    def save(self, path: str | PathLike[str]) -> None:
        """Write what the program communicates to a plan file, which ``md.load_plan`` reads.

        ``golden_plan`` of the pytest plugin takes inspections as it takes plans.

        Raises:
          PlanFileError: the file cannot be written.

        Example:
          >>> mesh = jax.make_mesh((8,), ("data",))
          >>> rows = jax.device_put(jnp.ones((64, 8)), jax.NamedSharding(mesh, jax.P("data")))
          >>> found = md.inspect(jax.jit(lambda x: x.sum(0)), rows)
          >>> found.save("sent.json")
          >>> bool(md.load_plan("sent.json").diff(found))
          False
        """
        self.record.save(path)

    def diff(self, other: "Plan | Inspection") -> PlanDiff:
        """Return how another compiled program, or a plan of the step, differs in what it communicates.

        Collectives of two programs are compared by kind, axes, phase and source text; those of a program and a plan by
        kind, axes and source text.

        Raises:
          ArgumentError: ``other`` is neither.
        """
        return self.record.diff(other)

    def report(self, path: str | PathLike[str], against: "Plan | Inspection | None" = None) -> None:
        """Write what the program communicates as one HTML page that works offline, as a plan's report is.

        Args:
          path: file to write. against: a plan or program to compare with.

        Raises:
          ArgumentError: ``path`` is not a path, or ``against`` neither a plan nor an inspection.
          MeshDSLError: the file cannot be written.
        """
        self.record.report(path, against)

    def compare(self) -> PlanComparison:
        """Plan the same step between the same inputs and outputs, and return both sides.

        Raises:
          ArgumentError: the step cannot be planned; the message says why.
        """
        return self._comparison

    @cached_property
    def _comparison(self) -> PlanComparison:
        return PlanComparison.of(self, self._step)

    def check(self, inputs: int = 2, limit: float = LIMIT, raises: bool = True) -> ProgramCheck:
        """Run the compiled program on simulated devices beside the step, and return which results are the step's.

        The program is compiled once more, and read before and after the partitioner, and as it runs. Behind the
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
          DeviceError: the compiler does not write its program before and after the partitioner.

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
          DeviceError: the compiler does not write its program before and after the partitioner.

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
        counted = count_text(len(self.collectives), "tensor")
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
            where = f"{c.source}  {shortened_line(c.text)}".rstrip()
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
            line = f"{names.of(place)}  {shortened_line(text)}".rstrip()
            shown = ", ".join(operations[:_KINDS])
            rows.append([f"{shown}{more}", tensor, "varying" if layout is None else str(layout), line])
        return "\n".join([f"{self.name} on mesh {self.mesh}, after the partitioner", *table(rows)])


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
      mesh: names the axes; default is the mesh of the program's inputs and outputs, its axes of one device left out
        where no ``jax.shard_map`` names them.
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
    traced = TracedStep.of(step, args, kwargs)
    over = mesh_of(traced.mesh if mesh is None else mesh)
    if topology is None and absent is not None:
        topology = absent.preset
    if topology is not None or not over.states_topology:
        sizes = over.sizes_by_name  # axes of one device name nothing that is sent, and each makes planning longer
        if mesh is None and not traced.has_shard_map:
            sizes = {name: size for name, size in sizes.items() if size > 1} or sizes
        over = Mesh(topology=topology or topology_at_hand(over).topology, **sizes)
    if over.size != traced.size:
        raise ArgumentError(f"mesh={over} has {over.size} devices, and {traced.name} runs on {traced.size}")
    if absent is None:
        return _inspection(traced, over)
    compiled = compiled_elsewhere(traced.traced, traced.compiled, absent.devices(over))
    return replace(_inspection(replace(traced, compiled=compiled), over), target=f"{absent} by {absent.compiler}")


def _inspection(traced: TracedStep, mesh: Mesh) -> Inspection:
    text = traced.compiled.as_text() or ""
    module = parse_module(text)
    lines = InstructionSources(text, module)
    sent = [
        (found, i, lines.metadata(found.sent.name, tensor.about))
        for found in read_schedule(module, mesh).collectives
        for i, tensor in enumerate(found.sent.tensors)
    ]
    pairs = [(found, i, scope_in(about) or found.sent.scope, lines.of(about)) for found, i, about in sent]
    names, flow = SourceNames(source for *_, source in pairs), Dataflow(module)
    found = tuple(inspected_collective(*pair, names, flow, traced.gathered_shapes) for pair in pairs)
    return Inspection(traced.name, mesh, found, compiled_bytes(traced.compiled), product_flops(module), traced)


def _recorded(c: InspectedCollective) -> Collective:
    """The collective in the form of a plan's."""
    dtype, _, dims = c.tensor.removesuffix("]").partition("[")
    return Collective(
        kind=c.kind,
        axes=c.axes or (c.over,),
        bytes=c.bytes,
        trips=c.trips,
        estimated=c.estimated,
        seconds=c.seconds,
        phase=c.phase,
        source=c.source,
        reason="; ".join(filter(None, (c.text, c.note))) or c.tensor,
        value=c.tensor,
        shape=tuple(int(n) for n in dims.split(",") if n),
        dtype=dtype,
    )


def _check_positive(name: str, given: object, kind: type) -> None:
    """Raises ArgumentError unless an argument is a number of a kind above 0."""
    if isinstance(given, bool) or not isinstance(given, kind) or not given > 0:  # type: ignore[operator]
        raise ArgumentError(f"{name}={given!r} is no {'whole number' if kind is int else 'number'} above 0")
