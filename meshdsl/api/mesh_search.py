"""Search over meshes and pipelines: how to train a step on a number of devices, the fastest configuration first.

    print(md.search(program, devices=64, topology="dgx-h100"))
    print(md.search(program, devices=64, axes=("pipe", "data", "model"), microbatches=(8, 32)))

A configuration is a mesh, which factors the devices over the axes, and a pipeline: a number of microbatches and, where
the axis ``pipe`` has several devices, a schedule, its chunks, and what stages recompute. All configurations are
enumerated and searched by branch and bound without branching: each gets a lower bound on seconds and on memory that
needs no planning (``meshdsl.planner.bounds.trivial``) and covers every variant of the program, and they are planned in
the order of that bound. A configuration whose bound exceeds the memory limit, or the seconds of a plan already found,
is pruned. Configurations without a plan are listed last, with the reason.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, product
from typing import Any

from meshdsl.api.alternatives import Choices
from meshdsl.api.ambient import JaxSettings
from meshdsl.api.options import parse_effort, parse_low_bits, parse_memory
from meshdsl.api.plan_variants import least_variant_seconds, plan_best_variant
from meshdsl.api.program import AXIS, Program, pipe_layouts, stacked_parameters
from meshdsl.api.sharded import parallelize
from meshdsl.api.stages import CallStages
from meshdsl.custom_rules import check_rules
from meshdsl.errors import ArgumentError, MeshDSLError, faults, first_fault, is_a, nearest
from meshdsl.ir.graph import TracedProgram
from meshdsl.layouts.axis_rules import Rules
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.roundness import Roundness, prime_factors
from meshdsl.layouts.topology import Topology, preset_names
from meshdsl.pins import AS_GIVEN, LayoutTable, fit_constraints
from meshdsl.pipelining import to_microbatches
from meshdsl.plan.plan import Plan
from meshdsl.planner.bounds.trivial import least_memory
from meshdsl.planner.limits import EFFORTS
from meshdsl.schedules.spec import CHUNKED, RECOMPUTE, SCHEDULES, Pipeline
from meshdsl.shardings import StatedTree, topology_at_hand
from meshdsl.trace import trace
from meshdsl.util.html import tables_html
from meshdsl.util.text import bytes_text, percent_text, seconds_text, table

log = logging.getLogger("meshdsl")

MICROBATCHES_PER_STAGE = 4  # where neither the program nor the user names a number
DEFAULT_AXES = {"data": 0, "model": 2}  # name -> position among the axes; other axes have position 1
SHOWN_REASONS = 8  # rows of the printed table of configurations without a plan


# ---- Configurations --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Configuration:
    """What is planned.

    Args:
      sizes: of the mesh axes.
      pipeline: None for the whole batch at once.
      taken: functions of ``md.alternatives``, by the name of what is chosen.
    """

    sizes: Mapping[str, int]
    pipeline: Pipeline | None
    taken: Choices = ()

    @property
    def stages(self) -> int:
        """Stages of the pipeline."""
        return self.sizes.get(AXIS, 1)

    @property
    def mesh(self) -> str:
        """The mesh as text."""
        return ",".join(f"{axis}={n}" for axis, n in self.sizes.items())

    @property
    def microbatches(self) -> int:
        """Microbatches per step."""
        return self.pipeline.microbatches if self.pipeline else 1

    @property
    def schedule(self) -> str:
        """Name of the schedule, its chunks, and ``kept`` if stages recompute nothing; empty for one stage."""
        if self.pipeline is None or self.stages == 1:
            return ""
        chunks = f"x{self.pipeline.chunks}" if self.pipeline.chunks > 1 else ""
        return " ".join(filter(None, (self.pipeline.name, chunks, "kept" * (self.pipeline.recompute == "none"))))

    def __str__(self) -> str:
        microbatches = f"{self.microbatches} microbatches" if self.microbatches > 1 else ""
        return ", ".join(filter(None, (self.mesh, self.schedule, microbatches, self.functions)))

    @property
    def functions(self) -> str:
        """The functions taken of ``md.alternatives``."""
        return ",".join(f"{name}={function}" for name, function in self.taken)


def configurations(
    devices: int,
    axes: Sequence[str],
    own: Pipeline | None,
    microbatches: Sequence[int] | None,
    schedules: Sequence[str],
    chunks: Sequence[int],
    recompute: Sequence[str] = ("stage",),
) -> list[Configuration]:
    """Return every configuration once: schedules matter with stages only, and several chunks with some schedules only.

    Args:
      own: the program's pipeline, from which settings that are not varied are taken.
      microbatches: None for the program's own number, else 4 per stage, and the whole batch at once without stages.
    """
    pairs = [(name, v) for name, v in product(schedules, chunks) if v == 1 or name in CHUNKED]
    pairs = [(name, v) for name, v in pairs if (name, v) != ("interleaved", 1) or "1f1b" not in schedules]  # the same
    found = []
    for sizes in factorizations(devices, axes):
        stages = sizes.get(AXIS, 1)
        default = own.microbatches if own else MICROBATCHES_PER_STAGE * stages if stages > 1 else 1
        for m in microbatches or (default,):
            plain = replace(own, microbatches=m, schedule="1f1b", chunks=1) if own else Pipeline(m)
            if stages == 1:
                found.append(Configuration(sizes, plain if m > 1 else None))
            else:
                found += [
                    Configuration(sizes, replace(plain, schedule=name, chunks=v, recompute=what))
                    for (name, v), what in product(pairs, recompute)
                ]
    return found


def factorizations(devices: int, axes: Sequence[str]) -> Iterator[dict[str, int]]:
    """Yield every way to factor the number of devices over the axes."""
    if len(axes) == 1:
        yield {axes[0]: devices}
        return
    for size in range(1, devices + 1):
        if devices % size == 0:
            yield from ({axes[0]: size, **rest} for rest in factorizations(devices // size, axes[1:]))


# ---- Bounds ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BoundedConfiguration:
    """A configuration with lower bounds on the seconds and bytes per device of its plans, or why it has none."""

    config: Configuration
    seconds: float = float("inf")
    memory: int = 0
    stages: CallStages | None = None
    program: TracedProgram | None = None
    fault: str = ""

    @property
    def memory_limit(self) -> float:
        """Bytes that a device may hold."""
        if self.stages is None:
            return float("inf")
        return self.stages.options.memory or self.stages.options.mesh.topology.memory

    @property
    def simulated(self) -> bool:
        """Whether plans are chosen by simulated seconds; the bound holds for these as well."""
        return self.stages is not None and self.stages.options.overlap.simulates

    def plan(self) -> Plan:
        """Plan the configuration."""
        assert self.stages is not None and self.program is not None
        options, program = self.stages.options, self.stages.with_uneven_pins(self.program)
        pins, limits, remat = self.stages.user_pins, EFFORTS[options.effort], options.remat != "off"
        choices: dict[str, Any] = {"overlap": options.overlap, "remat": remat, "host": options.host == "auto"}
        choices["staging"] = self.stages.staging if remat else None
        return plan_best_variant(program, options.mesh, pins, options.memory, limits=limits, **choices).plan


@dataclass
class ConfigurationSearch:
    """Bounds configurations of a program, traced once, and split in microbatches once per pipeline."""

    program: Program
    topology: Topology | str
    rules: Rules | str | None
    memory: str | None
    devices: int = 1
    effort: str = "default"
    _traced: dict[Choices, TracedProgram] = field(default_factory=dict)
    _microbatched: dict[Any, TracedProgram] = field(default_factory=dict)

    def bounded(self, config: Configuration) -> BoundedConfiguration:
        """Return the configuration with its bounds, or with the first fault that keeps it from being planned."""
        try:
            stages, program = self._traced_for(config)
            mesh = stages.options.mesh
            pins = stages.user_pins.resolve(program, mesh)
            seconds, memory = self._least_seconds(config, program, mesh), least_memory(program, mesh, pins)
            return BoundedConfiguration(config, seconds, memory, stages, program)
        except MeshDSLError as error:
            return BoundedConfiguration(config, fault=first_fault(error))

    def _least_seconds(self, config: Configuration, program: TracedProgram, mesh: Mesh) -> float:
        """Return a lower bound on the seconds of a configuration's plans, whichever way its stages recompute."""
        least, pipelined = least_variant_seconds(program, mesh), program.pipeline
        if self.program.remat == "off" or pipelined is None or not pipelined.axis or pipelined.loads:
            return least
        others = (replace(pipelined.asked, recompute=how) for how in RECOMPUTE if how != pipelined.asked.recompute)
        programs = (self._traced_for(replace(config, pipeline=other))[1] for other in others)
        return min(least, *(least_variant_seconds(each, mesh) for each in programs))

    @property
    def axes(self) -> list[str]:
        """Axes to try by default: those in pins and rules, ``data`` and ``model``, ``pipe`` if layers are stacked."""
        pinned = LayoutTable.of(self.program.layouts).axes
        ruled = [axis for table in self._rules.tables.values() for axes in table.values() for axis in axes]
        named = [axis for axis in dict.fromkeys((*pinned, *ruled)) if axis != AXIS]
        more = [axis for axis in reversed(DEFAULT_AXES) if axis not in named][: max(2 - len(named), 0)]
        staged = AXIS in (*pinned, *ruled) or (not self.on_devices and bool(stacked_parameters(self.traced)))
        return [AXIS] * staged + sorted([*named, *more], key=lambda axis: DEFAULT_AXES.get(axis, 1))

    @property
    def on_devices(self) -> bool:
        """Whether the step is written for one device, so that its program depends on the mesh."""
        return bool(self.program.axis_names)

    @property
    def traced(self) -> TracedProgram:
        """The program, the whole batch at once, with the first function of every ``md.alternatives``."""
        return self._traced_with(())

    @property
    def choices(self) -> list[Choices]:
        """All ways to take functions of ``md.alternatives``, also of those that only some functions say."""
        found, due = list[Choices](), [Choices(())]
        while due and not self.on_devices:
            taken = due.pop()
            try:
                offered = self._traced_with(taken).alternatives
            except MeshDSLError:  # the search says so of each mesh
                if not taken:
                    raise
                offered = ()
            new = next((each for each in offered if each.name not in dict(taken)), None)
            if new is None:
                found.append(taken)
            else:
                due += [(*taken, (new.name, function)) for function in reversed(new.names)]
        return found or [()]

    def _traced_with(self, taken: Choices) -> TracedProgram:
        """Return the program with some functions of ``md.alternatives``, its user-defined rules checked.

        One trace serves all meshes: which lengths they divide is that of the mesh with an axis per prime factor.
        """
        if taken in self._traced:
            return self._traced[taken]
        keep_cuts = bool(self.program.pipeline and self.program.pipeline.axis)
        inside, keep = self._rules.inside, self.program.constraints == "keep"
        run = partial(trace, self.program.step, self.program.args, inside=inside, cuts=keep_cuts, keep=keep)
        roundness, checkpoints = Roundness.of(prime_factors(self.devices)), self.program.remat != "replace"
        settings: dict[str, Any] = {"roundness": roundness, "checkpoints": checkpoints, "choices": taken}
        found = check_rules(JaxSettings.current().run(lambda: run(**settings)))
        self._traced[taken] = replace(found, low_bits=parse_low_bits(self.program.low_bits, []))
        return self._traced[taken]

    def _traced_for(self, config: Configuration) -> tuple[CallStages, TracedProgram]:
        """Return the stages of a configuration, and its program before uneven pins are constraints."""
        sharded = self._sharded(config)
        if self.on_devices:
            own: CallStages = sharded.stages(*self.program.args)
            return own, own.microbatched
        stages = CallStages(self.program.step, sharded.options, self._traced_with(config.taken))
        return stages, fit_constraints(self._program(stages, config), sharded.options.mesh)

    def _sharded(self, config: Configuration) -> Any:
        program = self.program
        return parallelize(
            program.step,
            Mesh(topology=self.topology, **config.sizes),
            self._layouts if AXIS in config.sizes else program.layouts,
            memory=self.memory,
            effort=self.effort,
            donate_argnums=tuple(range(len(program.args) - 1)),
            rules=self._rules,
            pipeline=config.pipeline,
            axis_names=program.axis_names,
            constraints=program.constraints,
            overlap=program.overlap,
            uneven=program.uneven,
            remat=program.remat,
            host=program.host,
            low_bits=program.low_bits,
        )

    def _program(self, stages: CallStages, config: Configuration) -> TracedProgram:
        """Return the program in microbatches; it depends on the stages and the pipeline alone."""
        if config.pipeline is None:
            return stages.traced
        key = config.stages, config.pipeline, config.taken
        if key not in self._microbatched:
            mesh, pins = stages.options.mesh, stages.user_pins
            self._microbatched[key] = to_microbatches(stages.traced, config.pipeline, mesh, pins)
        return self._microbatched[key]

    @cached_property
    def _rules(self) -> Rules:
        return Rules.of(self.rules or self.program.rules or Rules())

    @cached_property
    def _layouts(self) -> LayoutTable:
        return pipe_layouts(self.program, self._rules, lambda: self.traced)


# ---- Candidates ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """A configuration with its plan, or with the reason why it has none.

    Args:
      fault: why there is no plan; empty if there is one.
      least: a lower bound on the seconds of its plans.
      pruned: whether it was not planned because its bounds exclude it.
      simulated: whether plans are chosen by ``plan.simulated_seconds`` (``overlap="full"``).
    """

    config: Configuration
    plan: Plan | None
    fault: str = ""
    least: float = 0.0
    pruned: bool = False
    simulated: bool = False

    @property
    def mesh(self) -> str:
        """The mesh as text, ``"data=4,model=2"``."""
        return self.config.mesh

    @property
    def pipeline(self) -> Pipeline | None:
        """The pipeline; None for the whole batch at once."""
        return self.config.pipeline

    @property
    def microbatches(self) -> int:
        """Microbatches per step."""
        return self.config.microbatches

    @property
    def seconds(self) -> float:
        """Predicted seconds per step, simulated ones where plans are chosen by them; infinite without a plan."""
        if self.plan is None:
            return float("inf")
        return self.plan.simulated_seconds if self.simulated else self.plan.seconds

    @property
    def gap(self) -> float | None:
        """How much faster a plan on this mesh could be; None without a plan, or a bound on simulated seconds."""
        return None if self.plan is None or self.simulated else self.plan.gap

    @property
    def bubble(self) -> float | None:
        """Part of the time that stages of the pipeline are idle; None without stages."""
        found = self.plan.pipeline if self.plan else None
        return found.bubble if found and found.axis else None

    @property
    def facts(self) -> dict[str, Any]:
        """The candidate as plain values, for JSON; costs are None without a plan."""
        common: dict[str, Any] = {"mesh": self.mesh, "microbatches": self.microbatches}
        common |= {"schedule": self.config.schedule, "alternatives": dict(self.config.taken)}
        costs = {"seconds": self.seconds if self.plan else None, "gap": self.gap}
        costs |= {name: getattr(self.plan, name, None) for name in ("bytes", "memory")}
        reason = {"fault": self.fault, "pruned": self.pruned}
        return common | costs | {"least": self.least, "bubble": self.bubble} | reason


@dataclass(frozen=True)
class Search:
    """All candidates, the fastest first; those without a plan follow, pruned ones before faulty ones.

    ``print`` shows the plans in one table, and the reasons why others have none in a second one.

    Example:
      >>> found = md.search(lambda x: jnp.sin(x).sum(), jnp.ones((64, 64)), devices=4, axes=("data", "model"))
      >>> sorted(str(each.mesh) for each in found.candidates)
      ['data=1,model=4', 'data=2,model=2', 'data=4,model=1']
    """

    candidates: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate:
        """The fastest candidate; ArgumentError with all reasons if none has a plan."""
        if self.candidates[0].plan is None:
            rows = [f"{each.mesh}: {each.fault}" for each in self.candidates]
            raise ArgumentError(faults("no candidate can be planned:", rows))
        return self.candidates[0]

    def __str__(self) -> str:
        return "\n\n".join("\n".join(table(rows)) for rows in search_tables(self.candidates))

    def _repr_html_(self) -> str:
        planned = sum(each.plan is not None for each in self.candidates)
        return tables_html(f"{planned} of {len(self.candidates)} candidates planned", search_tables(self.candidates))


def search_tables(candidates: Sequence[Candidate]) -> Iterator[list[tuple[str, ...]]]:
    """Yield the candidates in two tables; candidates that have no plan for the same reason share a row."""
    planned, unplanned = list[tuple[str, ...]](), dict[tuple[str, str, str, str], list[Candidate]]()
    chosen = any(each.config.taken for each in candidates)
    for each in candidates:
        count = str(each.microbatches) if each.microbatches > 1 else ""
        if each.plan is None:
            key = count, each.config.schedule, each.config.functions, each.fault
            unplanned.setdefault(key, []).append(each)
        else:
            plan, bubble = each.plan, "" if each.bubble is None else f"{each.bubble:.1%}"
            sizes = bytes_text(plan.bytes), bytes_text(plan.memory)
            gap = "" if each.gap is None else percent_text(each.gap)
            costs = seconds_text(each.seconds), gap, bubble, *sizes
            taken = (each.config.functions,) * chosen
            planned.append((str(each.mesh), count, each.config.schedule, *taken, *costs))
    how = "microbatches", "schedule", *("functions",) * chosen
    if planned:
        yield [("mesh", *how, "step", "gap", "bubble", "sent", "memory"), *planned]
    if unplanned:
        rows: list[tuple[str, ...]] = [("not planned", *how, "because")]
        for (count, schedule, functions, fault), group in list(unplanned.items())[:SHOWN_REASONS]:
            more = f" and {len(group) - 1} more" if len(group) > 1 else ""
            rows.append((f"{group[0].mesh}{more}", count, schedule, *(functions,) * chosen, fault))
        rest = list(chain.from_iterable(list(unplanned.values())[SHOWN_REASONS:]))
        if rest:
            pruned = sum(each.pruned for each in rest)
            rows.append(
                (f"... {len(rest)} more", *("",) * len(how), f"{pruned} pruned, {len(rest) - pruned} infeasible")
            )
        yield rows


# ---- Search ----------------------------------------------------------------------------------------------------------


def search(
    step: Callable[..., Any] | Program,
    *args: Any,
    devices: int,
    topology: Topology | str | None = None,
    axes: Sequence[str] | None = None,
    microbatches: Sequence[int] | None = None,
    schedules: Sequence[str] = ("1f1b",),
    chunks: Sequence[int] = (1,),
    recompute: Sequence[str] = ("stage",),
    layouts: Mapping[str, StatedTree] | None = None,
    rules: Rules | str | None = None,
    memory: str | None = None,
    effort: str = "default",
    progress: Callable[[str], None] = lambda said: None,
) -> Search:
    """Plan a step on ``devices`` devices over every mesh of these axes, and every pipeline of these settings.

    Args:
      step: a program, or a function whose arguments are ``args``.
      *args: arrays or ``jax.ShapeDtypeStruct``, for a function.
      devices: number of devices.
      topology: costs of devices and links; a preset's name, or a topology. Default: that of the devices at hand.
      axes: mesh axes, outermost first; an axis may get a single device. Devices of ``pipe`` are stages: stacks of
        layers are split over it, also where no rule says so. Default: the axes that layouts and rules name, ``data``
        and ``model`` where they name fewer than two, and ``pipe`` if the program has a stack of layers.
      microbatches: numbers of microbatches to try, 1 for the whole batch at once. Default: 1, or 4 per stage.
      schedules: schedules to try where there are stages, by name.
      chunks: numbers of chunks per stage to try, with schedules that take several.
      recompute: what stages recompute in the backward pass, to try: ``"stage"``, ``"none"``, see ``md.Pipeline``.
      layouts: pins as in ``parallelize``, for a function.
      rules: mesh axes by named dims, as in ``parallelize``; for a program, in place of its own.
      memory: limit per device, such as ``"60GiB"``; default is the topology's.
      effort: how much planning is worth, as in ``parallelize``.
      progress: called with a line of text before each configuration.

    Returns:
      All candidates, the fastest first; ``print`` shows them, ``.best.plan`` is the fastest plan.

    Raises:
      ArgumentError: lists all arguments that are not of these kinds, or has the one reason why no mesh is possible.

    Example:
      >>> found = md.search(step, params, batch, devices=8, layouts=md.data_parallel(), axes=("data", "model"))
      >>> len(found.candidates), found.best.plan.mesh.size
      (4, 8)
    """
    _check_arguments(devices, topology, axes, microbatches, schedules, chunks, recompute, memory, effort, args, step)
    program = step if isinstance(step, Program) else Program(step, args, layouts)
    if LayoutTable.of(program.layouts).as_given:
        row = f"layouts: {AS_GIVEN!r} pins arguments to the one mesh that they lie on; give layouts by globs instead"
        raise ArgumentError(faults("invalid arguments of search:", [row]))
    if topology is None:  # one for all meshes: figures that were measured for some of them alone do not compare
        at_hand = topology_at_hand()
        topology = at_hand.topology
        if at_hand.assumed:
            log.warning("%s", at_hand.note)
    space = ConfigurationSearch(program, topology, rules, memory, devices, effort)
    progress("tracing")
    _ = space.on_devices or space.traced
    every = configurations(
        devices, space.axes if axes is None else axes, program.pipeline, microbatches, schedules, chunks, recompute
    )
    every = [replace(config, taken=taken) for config in every for taken in space.choices]
    bounded = []
    for i, config in enumerate(every, 1):
        progress(f"bounding {i} of {len(every)}: {config}")
        bounded.append(space.bounded(config))
    refused = {each.fault for each in bounded}
    if len(refused) == 1 and "" not in refused:  # for a reason that has to do with no mesh
        raise ArgumentError(faults(f"no mesh of {devices} devices can be planned:", refused))
    found, incumbent = list[Candidate](), float("inf")
    for i, each in enumerate(sorted(bounded, key=lambda each: each.seconds), 1):
        progress(f"planning {i} of {len(every)}: {each.config}")
        found.append(_planned(each, incumbent))
        incumbent = min(incumbent, found[-1].seconds)
    return Search(tuple(sorted(found, key=lambda each: (each.seconds, not each.pruned))))


def _planned(each: BoundedConfiguration, incumbent: float) -> Candidate:
    """Return the configuration with its plan, unless it is faulty, or pruned by its bounds.

    Args:
      incumbent: seconds of the fastest plan so far.
    """
    if each.fault:
        return Candidate(each.config, None, each.fault)
    if each.memory > each.memory_limit:
        reason = f"pruned: needs {bytes_text(each.memory)} at least"
        return Candidate(each.config, None, reason, each.seconds, pruned=True)
    if each.seconds >= incumbent:
        reason = f"pruned: takes {seconds_text(each.seconds)} at least"
        return Candidate(each.config, None, reason, each.seconds, pruned=True)
    try:
        return Candidate(each.config, each.plan(), "", each.seconds, simulated=each.simulated)
    except MeshDSLError as error:
        return Candidate(each.config, None, first_fault(error), each.seconds)


def _check_arguments(
    devices: Any,
    topology: Any,
    axes: Any,
    microbatches: Any,
    schedules: Any,
    chunks: Any,
    recompute: Any,
    memory: Any,
    effort: Any,
    args: tuple[Any, ...],
    step: Any,
) -> None:
    def is_size(n: object) -> bool:
        return isinstance(n, int) and not isinstance(n, bool) and n >= 1

    def are_sizes(given: Any) -> bool:
        return not isinstance(given, int | str) and bool(given) and all(map(is_size, given))

    rows = [] if is_size(devices) else [f"devices: {is_a(devices)}, not a positive number of devices"]
    parse_memory(memory, rows)
    parse_effort(effort, rows)
    if not isinstance(topology, Topology | None) and topology not in preset_names():
        rows.append(f"topology: no topology {topology!r}{nearest(topology, preset_names())}")
    if axes is not None and (isinstance(axes, str) or not axes or len(set(axes)) < len(axes)):
        rows.append(f"axes: {axes!r}, not names of different mesh axes, such as ('data', 'model')")
    if microbatches is not None and not are_sizes(microbatches):
        rows.append(f"microbatches: {microbatches!r}, not numbers to try, such as (1, 4, 8)")
    if isinstance(schedules, str) or not schedules:
        rows.append(f"schedules: {schedules!r}, not names of schedules to try, such as ('1f1b', 'gpipe')")
    else:
        unknown = [name for name in schedules if name not in SCHEDULES]
        rows += [f"schedules: no schedule {name!r}{nearest(name, SCHEDULES)}" for name in unknown]
    if isinstance(recompute, str) or not recompute:
        rows.append(f"recompute: {recompute!r}, not what to try, such as ('stage', 'none')")
    else:
        unknown = [name for name in recompute if name not in RECOMPUTE]
        rows += [f"recompute: no choice {name!r}{nearest(name, RECOMPUTE)}" for name in unknown]
    if not are_sizes(chunks):
        rows.append(f"chunks: {chunks!r}, not numbers to try, such as (1, 2)")
    elif 1 not in chunks and not set(CHUNKED) & set(schedules):
        names = " or ".join(map(repr, CHUNKED))
        rows.append(f"chunks: {chunks!r}, but only {names} takes several chunks, and schedules={schedules!r}")
    if isinstance(step, Program) and args:
        rows.append(f"args: {len(args)} arguments beside a program, which has its own; leave them out")
    if rows:
        raise ArgumentError(faults("invalid arguments of search:", rows))
