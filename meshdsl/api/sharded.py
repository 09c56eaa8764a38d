"""``parallelize``: a step of ordinary JAX, planned over a mesh and run as planned.

    sharded = parallelize(step, Mesh(data=4, model=2), layouts={"batch": "data=S(0)"})
    print(sharded.plan(params, batch))       # nothing is compiled, no devices are needed
    params = sharded(params, batch)          # runs exactly that plan

A call goes down the stages of ``meshdsl.api.stages``, once per kind of call.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial, update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar
from weakref import WeakValueDictionary

import jax

from meshdsl.api.alternatives import Trace, with_best_alternatives
from meshdsl.api.ambient import JaxSettings, call_settings, explicit_mesh, explicit_type
from meshdsl.api.axis_names import inner_of_pmap
from meshdsl.api.calls import CallForm, CallKind, leaf_forms, leaf_type, nearest_kind
from meshdsl.api.check import check_step
from meshdsl.api.executable import Executable
from meshdsl.api.explain import Explanation, explain
from meshdsl.api.frontier import Frontier, frontier
from meshdsl.api.options import Options, parse_memory, parse_options, parse_pin_changes
from meshdsl.api.overlap_option import Overlap
from meshdsl.api.plan_variants import PlannedProgram
from meshdsl.api.stages import CallStages, check_inferred_specs, trace_for
from meshdsl.api.sums import SUMS_LIMIT, check_sums
from meshdsl.errors import ArgumentError, MeshDSLError, faults, shortened
from meshdsl.ir.graph import TracedProgram
from meshdsl.layouts.axis_rules import Rules
from meshdsl.layouts.low_bits import LowBits
from meshdsl.lowering.aot_targets import parse_target
from meshdsl.lowering.numerics import CheckReport, check_tolerance
from meshdsl.lowering.overlap import check_judgement
from meshdsl.lowering.reference import is_divided, whole_step
from meshdsl.lowering.shardings import device_mesh
from meshdsl.lowering.verify import VerifyReport, verify_here, verify_target
from meshdsl.pins import GivenLayouts, place_of
from meshdsl.pipelining import whole_function
from meshdsl.plan.build import without_rule
from meshdsl.plan.plan import Plan
from meshdsl.schedules.spec import Pipeline
from meshdsl.shardings import StatedMesh, StatedTree
from meshdsl.trace import Call, PureStep, flatten_call
from meshdsl.trace.arguments import check_values, static_keys, step_name
from meshdsl.trace.objects import bind, has_cycles, is_module, is_object, is_unit
from meshdsl.trace.pure_step import Maker
from meshdsl.trace.shard_maps import explicit_specs

__all__ = ["Options", "Sharded", "parallelize"]

Params = ParamSpec("Params")  # the step's parameters
Result = TypeVar("Result")  # its result

log = logging.getLogger("meshdsl")

_flatten_tree = jax.tree_util.default_registry.flatten  # as ``jax.tree.flatten``, with less Python


def parallelize(
    step: Callable[Params, Result],
    mesh: StatedMesh,
    layouts: Mapping[str, StatedTree] | str | None = None,
    outputs: Mapping[str, StatedTree] | None = None,
    memory: str | float | None = None,
    donate_argnums: int | Iterable[int] = (),
    donate_argnames: str | Iterable[str] = (),
    static_argnums: int | Iterable[int] = (),
    static_argnames: str | Iterable[str] = (),
    plan: Plan | None = None,
    devices: Sequence[jax.Device] | None = None,
    rules: Rules | str | None = None,
    pipeline: Pipeline | None = None,
    overlap: bool | str | Overlap = False,
    time_limit: float | None = None,
    effort: str = "default",
    axis_names: Mapping[str, str | Sequence[str]] | None = None,
    constraints: str = "keep",
    uneven: str = "error",
    remat: str = "off",
    host: str = "off",
    low_bits: LowBits | float | str | None = None,
) -> "Sharded[Params, Result]":
    """Return the step as a function that is planned over ``mesh`` and runs as planned.

    Nothing is traced or planned before the first call, or before the first ``plan``, ``lower``, ``verify``, ``check``.

    Args:
      step: a function of pytrees of arrays, as ``jax.jit`` takes it; of one that ``jax.pmap`` returned, the function
        that it maps is taken, and arrays are whole.
      mesh: a mesh, its text ``"data=4,model=2"``, or a mesh of jax, whose devices are then used. Where it states no
        topology, that of ``plan`` is taken, else that of the devices at hand, which the plan says.
      layouts: pins by globs over argument names and tree paths; axes not named are free. A layout may be a
        ``PartitionSpec`` or ``NamedSharding``: axes that it does not name are then ``B``, as in jax; a pytree of these,
        or a dict of any layouts, stands for a layout per leaf, at the paths below the glob. Strategies such as
        ``md.fsdp()`` are pins too, combined by ``|``. ``"as-given"`` pins the arguments that lie sharded as they lie.
      outputs: pins by globs over the results' paths; other results follow the inputs that they replace.
      rules: mesh axes by named dims, ``"batch:data hidden:model"``; where ``layouts`` names an axis too, it wins.
      memory: limit per device, in bytes or as text such as ``"60GiB"``; default is the topology's.
      donate_argnums: arguments whose buffers the step may reuse, as in ``jax.jit``.
      donate_argnames: the same by name.
      static_argnums: arguments that are no arrays, as in ``jax.jit``.
      static_argnames: the same by name.
      plan: run this plan, one that was loaded for example, instead of planning; mesh, topology, memory and pins have to
        agree with it.
      devices: the devices of the mesh, outermost axis first; default is the first of ``jax.devices()``.
      pipeline: take the batch in microbatches, through stages where layers are split; default is as in ``plan``.
      overlap: whether communication is hidden behind computation. ``"off"`` or ``False``, the default: layouts are
        chosen by ``plan.seconds``, where operations run one after the other. ``"prefetch"``: the same layouts, but
        loops over layers send the collectives of a layer beside the computation of its neighbours, where the devices
        can and it pays. ``"full"`` or ``True``: that, layouts are chosen by ``plan.simulated_seconds``, and products
        run in parts beside the hops of a ring where it pays. ``md.Overlap`` also says which loops, and which products.
      time_limit: seconds of planning after which nothing more is tried to improve the plan and its bound; a note in the
        plan says so, with the gap. Default is none: work is bounded in any case, and the plan is always the same.
      effort: how much planning is worth. ``"default"`` ends when at most 1% is open between the plan and its lower
        bound and closing it is not quick; ``"fast"`` with a third of that work, at 3%; ``"prove"`` goes on until both
        meet, or raising the bound no longer helps. Work is counted, not timed: the plan is the same on every machine.
      axis_names: mesh axes by the axis names of the step's collectives, ``{"batch": "data"}`` or
        ``{"batch": "(data,fsdp)"}``. The step is then written for one device, as for ``jax.pmap``: arguments that are
        pinned split over these axes are cut, all others are whole on every device. Default: a name that the step uses
        is found where only one set of mesh axes splits arguments.
      constraints: what ``jax.lax.with_sharding_constraint``, ``jax.sharding.reshard``, ``jax.device_put`` and the
        shardings of a ``jax.jit`` inside the step do: ``"keep"`` takes them as ``md.constrain``, over mesh axes of the
        same names; ``"ignore"`` plans freely.
      uneven: what becomes of a pin whose dim does not divide over its axes, as in the last batch of an evaluation:
        ``"error"``, ``"replicate"`` (over these axes, for that array), or ``"pad"`` (replicated at the step's boundary,
        padded, split and masked inside: the numbers are those of the step as written). A note in the plan and one line
        in the log name the array.
      remat: what the backward pass computes again instead of keeping it. ``"off"``, the default: what the step says by
        ``jax.checkpoint``. ``"auto"``: besides, residuals that the planner chooses, if the fastest plan that keeps them
        all exceeds the memory and a plan that computes some again is the fastest of those that fit
        (``plan.recomputation``, ``plan.waterfall``). ``"replace"``: likewise, but the step's own ``jax.checkpoint`` is
        taken out first, with its policies, so that the planner alone chooses; a note in the plan names its lines. In a
        pipeline either also chooses what stages keep, in place of ``Pipeline.recompute``.
      host: what lives in the host's memory. ``"off"``, the default: arguments that ``layouts=`` puts there
        (``@host``). ``"auto"``: besides, arguments and residuals of loops over layers that the planner chooses, if the
        fastest plan without that exceeds the memory and one with it is the fastest of those that fit (``plan.host``,
        ``plan.waterfall``).
      low_bits: how much collectives may round what they send, a relative root mean square such as ``0.01``, or
        ``md.LowBits``; default is nothing. Floats may then be gathered, scattered and exchanged in bfloat16, int8 or
        float8 with a scale per 128 numbers, where the format loses no more of normal numbers and that is cheaper.
        Results, and what a loop carries, are sent in full; sums are taken in float32. ``check`` measures the results.

    Returns:
      The sharded step, with the parameters, the result, the name and the documentation of ``step``.

    Raises:
      ArgumentError: lists all arguments that are not of these kinds.

    Example:
      >>> sharded = md.parallelize(step, md.Mesh(data=4, model=2, topology="dgx-h100"), {"batch": "data=S(0)"})
      >>> print(sharded.plan(params, batch).layout("batch"))
      data=S(0) model=B
      >>> params = sharded(params, batch)

    The search space and the cost model follow Alpa (Zheng et al. 2022) and GSPMD (Xu et al. 2021); every plan comes
    with a lower bound, see ``meshdsl.planner``.
    """
    inner = inner_of_pmap(step)
    options = parse_options(
        inner or step,
        mesh=mesh,
        layouts=layouts,
        outputs=outputs,
        rules=rules,
        memory=memory,
        donate_argnums=donate_argnums,
        donate_argnames=donate_argnames,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        plan=plan,
        devices=devices,
        pipeline=pipeline,
        overlap=overlap,
        time_limit=time_limit,
        effort=effort,
        axis_names=axis_names,
        constraints=constraints,
        mapped=inner is not None,
        uneven=uneven,
        remat=remat,
        host=host,
        low_bits=low_bits,
    )
    return Sharded(inner or step, options)


class Sharded(Generic[Params, Result]):
    """A step that is planned over a mesh and runs as planned; call it as the step itself, whose name it has.

    The methods take arguments like those of the step: a call takes arrays, the others take arrays or
    ``jax.ShapeDtypeStruct`` in any pytree. What a call is planned, lowered and compiled into is kept for all calls of
    its kind (equal trees, shapes, dtypes, static arguments and settings of jax).

    Example:
      >>> sharded = md.parallelize(step, "data=8", md.data_parallel())
      >>> print(sharded.plan(params, batch).layout("batch"))
      data=S(0)
      >>> params = sharded(params, batch)
    """

    def __init__(self, step: Callable[Params, Result], options: Options) -> None:
        update_wrapper(self, step, updated=())
        self.step, self.options = step, options
        self._stages: dict[CallKind, CallStages] = {}
        self._traced: dict[CallKind, TracedProgram] = {}  # likewise; shared with ``with_pins`` unless pins matter
        self._starts: dict[CallKind, PlannedProgram] = {}  # plans under the pins before ``with_pins``
        self._warned: set[str] = set()
        self._typed: set[tuple[CallKind, Any]] = set()  # kinds and types over Explicit axes that have this program
        self._forms: dict[Any, CallForm] = {}  # by form of call, for ``__call__``
        self._plain: set[type] = set()  # of arguments of earlier calls that hold no modules
        self._acyclic: WeakValueDictionary[int, Any] = WeakValueDictionary()  # objects of earlier calls
        self._static: dict[Any, tuple[int | str, ...]] = {}  # static arguments, by number of arguments and keywords
        self._has_static = bool(options.static_argnums or options.static_argnames)

    def __call__(self, *args: Params.args, **kwargs: Params.kwargs) -> Result:
        """Run the step as planned.

        Arguments that are sharded as planned are passed on as they are; numpy arrays and uncommitted arrays are placed;
        arrays committed to another layout are moved at every call, with one warning.

        Returns:
          The step's result, sharded as planned.

        Raises:
          PinError, MemoryLimitError, TraceError: the call cannot be planned, see ``plan``.
          TraceError: an argument is a shape without values, or was donated to an earlier call.
          DeviceError: there are fewer devices than the mesh has.
        """
        arguments, static = self._split(args, kwargs) if self._has_static else ((args, kwargs), ())
        given = (*args, *kwargs.values())
        cyclic = not self._plain.issuperset(map(type, given)) and self._is_cyclic(given, arguments)
        leaves, tree = _flatten_tree(arguments, is_object if cyclic else None)  # no form of cyclic ones is kept
        key = tree, static, call_settings(), self._looks(tree, leaves)
        try:
            form = self._forms.get(key)
        except TypeError:  # something cannot be hashed, which ``_flatten`` reports
            form = None
        found = form.inputs(arguments, leaves) if form else None
        result: Result
        if form is None or found is None:
            result = self._first_run(self._flatten(args, kwargs), key, arguments, leaves)
        else:
            result = form.run(*found)
        return result

    def __repr__(self) -> str:
        return f"<{step_name(self.step)} on mesh {self.options.mesh}>"

    # ---- Plan

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """Return the plan for arguments like these; nothing is compiled, and no devices are needed.

        Args:
          *args: arguments of the step, arrays or ``jax.ShapeDtypeStruct``; keywords as well.

        Returns:
          The plan: ``print(plan)`` shows predicted seconds per step, bytes per device, layouts, and every collective
          with its reason; ``plan.save(file)`` writes it.

        Raises:
          TraceError: the step cannot be traced, or takes other arguments.
          PinError: the pins match nothing, contradict each other or cannot be met.
          PipelineError: the step cannot run in these microbatches or stages.
          MemoryLimitError: no plan within the memory limit was found; the error says what takes the memory.
          PlanFileError: the given plan is not one of this step.

        Example:
          >>> print(sharded.plan(params, jax.ShapeDtypeStruct((256, 512), jnp.float32)))
        """
        return self._stages_of(self._flatten(args, kwargs)).planned.plan

    def stages(self, *args: Any, **kwargs: Any) -> CallStages:
        """Return the stages for arguments like these, each computed on first use and kept.

        Example:
          >>> print(sharded.stages(params, batch).traced.graph)
        """
        return self._stages_of(self._flatten(args, kwargs))

    def with_pins(self, layouts: Mapping[str, StatedTree | None]) -> "Sharded[Params, Result]":
        """Return the same step under other pins, planned in a fraction of the time from where this plan was found.

        The step is not traced again, and cost tables are shared. The plan is not improved in rounds, so ``plan.gap``
        may be larger than that of a step that is parallelized anew. With ``remat=`` or ``host="auto"`` it is planned
        anew.

        Args:
          layouts: pins by globs, as ``parallelize`` takes them; one of the same glob is replaced, None removes it.

        Raises:
          ArgumentError: a value is no layout, or a glob to remove is not among the pins.

        Example:
          >>> sharded.with_pins({"params/embed": "model=S(0)"}).plan(*args).seconds
        """
        changed = parse_pin_changes(layouts, self.options.layouts, self.options.mesh)
        remat = self.options.remat if self.options.keeps_checkpoints else "replace"
        other = Sharded(self.step, replace(self.options, plan=None, layouts=changed, remat=remat))
        if other.options.keeps_checkpoints == self.options.keeps_checkpoints:
            other._traced = self._traced
        found = {key: stages.new_plan for key, stages in self._stages.items()}
        other._starts = self._starts | {key: planned for key, planned in found.items() if planned is not None}
        return other

    pinned = with_pins  # an alias

    def explain(self, path: str, *args: Any, **kwargs: Any) -> Explanation:
        """Return why the input at ``path`` has its layout: what every other layout would cost, each planned in full.

        Args:
          path: of an input, as the plan prints it, ``"params/w1"``.
          *args: arguments of the step, arrays or ``jax.ShapeDtypeStruct``; keywords as well.

        Raises:
          LayoutError: there is no such input; the error has the nearest path.

        Example:
          >>> print(sharded.explain("params/w1", params, batch))
        """
        stages = self._stages_of(self._flatten(args, kwargs))
        return explain(stages.planned.plan, path, stages)

    def frontier(
        self, *args: Any, points: int = 8, limits: str | float | Sequence[str | float] = (), **kwargs: Any
    ) -> Frontier:
        """Return step time against memory limit, from the least possible to no limit; each point is planned in full.

        Args:
          *args: arguments of the step, arrays or ``jax.ShapeDtypeStruct``; keywords as well.
          points: how many limits, spaced evenly from the smallest plan found to the fastest one.
          limits: such as ``("40GiB", "60GiB")``, in their place; those that no plan fits are left out.

        Raises:
          ArgumentError: there are fewer than 2 points, or a limit is no size.
          MemoryLimitError: no plan fits the largest of the limits.

        Example:
          >>> print(sharded.frontier(params, batch, points=4))
        """
        if isinstance(points, bool) or not isinstance(points, int) or points < 2:
            raise ArgumentError(f"points={points!r} of a frontier: give 2 or more, the least memory and no limit")
        given = [limits] if isinstance(limits, str | int | float) else list(limits)
        rows: list[str] = []
        sizes = [parse_memory("none" if limit is None else limit, rows) for limit in given]
        if rows:
            raise ArgumentError(faults("limits of a frontier:", rows, "write bytes, or text like '60GiB'"))
        call = self._flatten(args, kwargs)
        within = partial(self._stages_of(call).plan_within, is_brief=not given)
        simulated = self.options.overlap.simulates
        return frontier(call.name, within, points, [size for size in sizes if size is not None], simulated)

    # ---- Run

    def init(self, make: Callable[[], Any], *rest: Any, **kwargs: Any) -> Any:
        """Make the first arguments of the step where the plan wants them: no device holds more than its shard.

        Args:
          make: takes nothing, and returns the first argument, or a tuple of the first several.
          *rest: the other arguments, arrays or ``jax.ShapeDtypeStruct``; keywords as well.

        Returns:
          What ``make`` returns, sharded as planned.

        Example:
          >>> params = sharded.init(lambda: init_params(jax.random.key(0)), batch)
        """
        made = Maker(make)
        with JaxSettings.current().applied():
            shapes = jax.eval_shape(made)
            first = made.unflatten(shapes)
            call = self._flatten((*(first if isinstance(first, tuple) else (first,)), *rest), kwargs)
            places = list(self._stages_of(call).executable.shardings)[: len(shapes)]
            return made.unflatten(jax.jit(made, out_shardings=places)())

    def input_shardings(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return where the step takes its arguments: ``args`` and ``kwargs``, with a ``NamedSharding`` for each array.

        Arguments that are placed so are passed on as they are; others are placed at each call.

        Example:
          >>> (at_params, at_batch), _ = sharded.input_shardings(params, batch)
          >>> batch = jax.device_put(batch, at_batch)
        """
        call = self._flatten(args, kwargs)
        return call.arguments(self._stages_of(call).executable.shardings)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Return the lowered program over flat arrays, as ``jax.jit(step).lower`` does."""
        return self._stages_of(self._flatten(args, kwargs)).executable.lowered

    # ---- Check against the compiled program and the unsharded numbers

    def verify(
        self,
        *args: Any,
        target: str | None = None,
        exposed: str | None = None,
        sums: float = SUMS_LIMIT,
        **kwargs: Any,
    ) -> VerifyReport:
        """Compare the compiled collectives with the planned ones, and the results of both with those of the step.

        Reports memory and FLOPs of both sides; for TPUs and GPUs, whose compilers state in which order a device runs,
        also what runs beside each collective. Results are those of the unsharded step if simulated devices compute the
        same from random arguments: in exact arithmetic as the program is lowered, in float64 as it is compiled; what
        ``low_bits`` rounds is sent in full there.

        Args:
          *args: arguments of the step, arrays or ``jax.ShapeDtypeStruct``; keywords as well.
          target: absent devices to compile for, such as ``"tpu-v5e:4x4"`` (needs ``libtpu``); default is the devices
            at hand. A target's compiler may rewrite collectives, so the program is compared as it is lowered.
          exposed: what becomes of a program that has less communication beside products than the plan hides: an
            ``"error"``; a note and a log message, ``"warn"``; or ``"ignore"``, which leaves it at the table. Default is
            ``"error"`` if ``parallelize`` was asked for overlap, so that the plan was chosen for it, else ``"ignore"``.
          sums: elements that may be computed to check the results. The default, 1e7, takes about a second; larger
            steps are not checked, as the report says. 0 checks none, 1e9 take some minutes. A target's program is
            checked as it is lowered only.

        Returns:
          A report; ``print`` shows planned and compiled bytes per kind of collective and axis, the schedule, and how
          many results agree.

        Raises:
          VerifyError: planned and compiled collectives differ, a result is not the step's (the message names the
            operation that makes it so, its mesh axes and its line), or the target's memory does not suffice.
          OverlapError: the compiled program hides less than the plan.
          DeviceError: the target is unknown, has another number of devices, or its compiler is not installed.
        """
        judged = exposed if exposed is not None else "error" if self.options.overlap else "ignore"
        check_judgement(judged)
        if isinstance(sums, bool) or not isinstance(sums, int | float) or not sums >= 0:
            raise ArgumentError(f"sums={sums!r} is no number of elements; give 0 to check no results")
        call = self._flatten(args, kwargs)
        stages = self._stages_of(call)
        if target is None:
            executable = stages.executable
            platform = executable.devices.devices.flat[0].platform
            report = verify_here(executable.expected, executable.compiled, executable.plan.mesh, platform, judged)
        else:
            found = parse_target(target)
            executable = stages.executable_on(device_mesh(self.options.mesh, found.devices(self.options.mesh)))
            report = verify_target(executable.expected, executable.lowered, executable.plan.mesh, found, judged)
        if not sums:
            return report
        settings, reference = self._reference_settings(stages), self._reference(call, stages)
        return report.with_sums(check_sums(executable, call.leaves, reference, settings, sums, target is None))

    def check(self, *args: Any, tolerance: float | None = None, divide: str = "planned", **kwargs: Any) -> CheckReport:
        """Run one step sharded and unsharded, on copies of the arguments, and compare all results.

        Args:
          *args: arguments of the step, with values; keywords as well.
          tolerance: relative to the largest value of a result; default follows from how much the unsharded results
            change when the arguments are perturbed by rounding errors.
          divide: ``"planned"`` runs the plan of the call. ``"most"`` runs another plan within the same pins, which
            divides as much as it can whatever that communicates: small arguments then test what is divided of large
            ones.

        Returns:
          A report; ``print`` shows the largest errors, how much of the compute was divided over each mesh axis, and
          which results nothing divided leads to, so that they would agree under any plan.

        Raises:
          CheckError: a result differs by more than the tolerance, or there is none.

        Example:
          >>> print(sharded.check(params, small_batch, divide="most"))
        """
        check_tolerance(tolerance)
        call = self._flatten(args, kwargs)
        check_values(call.name, call.paths, call.leaves)
        stages = self._stages_of(call)
        settings, reference = self._reference_settings(stages), self._reference(call, stages)
        return settings.run(lambda: check_step(stages, reference, call.leaves, tolerance, divide))

    def _reference(self, call: Call, stages: CallStages) -> Callable[..., Any]:
        """Return the unsharded step on flat arrays."""
        estimates = bool(self.options.pipeline and self.options.pipeline.per_microbatch)
        graph = stages.program.graph if estimates else stages.checked.graph
        if is_divided(graph):
            return whole_step(graph, stages.executable.devices)
        if estimates:
            return whole_function(graph)
        pure = PureStep(self.step, call)
        return stages.devices.whole(pure) if stages.devices else pure

    @staticmethod
    def _reference_settings(stages: CallStages) -> JaxSettings:
        """Return the settings of jax under which the unsharded step is traced."""
        return stages.settings if stages.traced.spread else replace(stages.settings, mesh=None)

    # ---- Calls and their stages

    def _flatten(self, args: Any, kwargs: Any) -> Call:
        return flatten_call(self.step, args, kwargs, self.options.static_argnums, self.options.static_argnames)

    def _split(self, args: Any, kwargs: Any) -> tuple[Any, tuple[Any, ...]]:
        """Return the arguments that are arrays, and the static ones by position or name, each with its type."""
        given = len(args), *kwargs
        if given not in self._static:
            o = self.options
            found = static_keys(self.step, len(args), kwargs, o.static_argnums, o.static_argnames)
            names = sorted(key for key in found if isinstance(key, str))
            self._static[given] = (*sorted((key for key in found if isinstance(key, int)), reverse=True), *names)
        static = self._static[given]
        dynamic, keywords, values = list(args), dict(kwargs), []
        for key in static:  # from the last position to the first, then names
            values.append(dynamic.pop(key) if isinstance(key, int) else keywords.pop(key))
        return (dynamic, keywords), (static, *values, *map(type, values))

    @cached_property
    def _at_hand(self) -> Options:
        """The options under which calls are planned: without a stated topology, with that of the devices at hand."""
        return self.options.at_hand()

    def _stages_of(self, call: Call) -> CallStages:
        """Return the stages of this kind of call; a new kind is traced, and logged if another has been planned."""
        kind, options = CallKind.of(self.step, call), self._at_hand
        if options.layouts.as_given:
            given = GivenLayouts.of(call.name, call.paths, call.leaves, options.mesh)
            kind, options = replace(kind, lies=given.layouts), options.as_given(given)
            if kind not in self._stages and (stages := self._stages_taking(kind, given)):
                self._stages[kind] = stages
        if kind not in self._stages:
            devices, program = None, self._traced.get(kind.anywhere)
            if program is None:
                try:
                    devices, program = trace_for(self.step, options, call, kind)
                except Exception as error:
                    self._note_changes(error, kind)
                    raise
                self._typed.add((kind.anywhere, tuple(map(explicit_type, call.leaves))))
            start = self._starts.get(kind) if devices is None else None  # else the program depends on the pins
            if start is not None and start.plan.alternatives != program.taken:
                start = None
            stages = CallStages(self.step, options, program, devices, start=start, settings=kind.settings)
            if program.alternatives and options.plan is None:
                stages = self._with_alternatives(kind, stages, partial(trace_for, self.step, options, call, kind))
            if devices is None:
                self._traced.setdefault(kind.anywhere, stages.traced)
            stages = self._after_others(kind, stages)
            if stages.uneven:
                log.warning("%s: %s", stages.traced.name, "; ".join(shortened(stages.uneven_notes)))
            self._stages[kind] = stages
        stages, types = self._stages[kind], (kind.anywhere, tuple(map(explicit_type, call.leaves)))
        if types not in self._typed and explicit_specs(stages.traced):
            check_inferred_specs(self.step, stages.options, call, kind, stages.traced)
            self._typed.add(types)
        return stages

    def _stages_taking(self, kind: CallKind, given: GivenLayouts) -> CallStages | None:
        """Return the stages of the same call with arguments elsewhere, if its plan takes them where they lie now.

        So does the plan of a first call take the results of that call, which lie where it put them.
        """
        alike = (stages for each, stages in self._stages.items() if each.anywhere == kind.anywhere)
        return next((stages for stages in alike if stages.takes(given)), None)

    def _with_alternatives(self, kind: CallKind, stages: CallStages, trace: Trace) -> CallStages:
        """Return the stages with functions chosen, or with those of an earlier kind whose plan is taken over.

        Args:
          trace: returns the program of the call with other functions.
        """
        alike = [other for other in self._stages if kind.has_arrays_of(other)]
        planned = [other for other in alike if self._stages[other].new_plan is not None]
        former = self._stages[nearest_kind(kind, planned)] if planned else None
        if former is not None:
            try:
                devices, program = trace(former.traced.taken)
            except MeshDSLError:  # other static arguments, which these functions refuse
                return with_best_alternatives(stages, trace)
            same = replace(stages, traced=program, devices=devices, start=None)
            if same.has_program_of(former):
                return replace(same, rivals=former.rivals)
            if any(map(kind.is_same_but_weak, planned)):
                return same
        return with_best_alternatives(stages, trace)

    def _after_others(self, kind: CallKind, stages: CallStages) -> CallStages:
        """Return the stages with another kind's as their former ones if that one's layouts are taken over; log it."""
        planned = {other: each for other, each in self._stages.items() if each.new_plan is not None}
        if not planned:
            return stages
        equal = [other for other, each in planned.items() if stages.has_program_of(each)]
        alike = equal or list(filter(kind.is_same_but_weak, planned))
        nearest = nearest_kind(kind, alike or list(planned))
        name, what = stages.traced.name, "; ".join(kind.differences(nearest))
        if equal:
            log.info("%s is traced again and keeps its plan: %s", name, what)
        else:
            log.warning("planning %s again%s: %s", name, " between the same layouts" if alike else "", what)
        return replace(stages, former=planned[nearest]) if alike else stages

    def _note_changes(self, error: Exception, kind: CallKind) -> None:
        """Add what is new in a call that cannot be traced to its error: after an earlier one, or beside a plan."""
        if self._stages:
            before = nearest_kind(kind, list(self._stages))
            error.add_note(f"unlike an earlier call: {'; '.join(kind.differences(before))}")
        elif self.options.plan is not None and (rows := kind.unplanned(self.options.plan.inputs)):
            error.add_note(faults("plan= is for other arguments:", shortened(rows)))

    def _warn(self, executable: Executable) -> None:
        """Log, once each, the notes by which the program means something else than the step, or runs replicated."""
        program = executable.program
        for text in (*program.warnings, *without_rule(program, executable.plan.solution)):
            if text not in self._warned:
                self._warned.add(text)
                log.warning("%s: %s", program.name, text)

    def _first_run(self, call: Call, key: Any, arguments: Any, leaves: Sequence[Any]) -> Any:
        """Run a call of a new form.

        Args:
          key: of the form.
          arguments: the tree of arguments, static ones left out.
          leaves: of that tree.
        """
        check_values(call.name, call.paths, call.leaves)
        stages = self._stages_of(call)
        devices = explicit_mesh(device_mesh(self.options.mesh, self.options.devices), call.leaves)
        executable = stages.executable_on(devices)
        self._warn(executable)
        if executable.closes_over_tracers or any(isinstance(x, jax.core.Tracer) for x in call.leaves):
            return executable.finish(executable.inline(call.leaves), call.leaves, call.objects)
        binding = bind(arguments, call.tree, call.objects) if call.objects.roots else None
        form = CallForm(executable, call.leaves, key[0], leaves, binding)
        outputs, inputs = form.outputs(call.leaves)
        result = executable.finish(outputs, call.settle(inputs), call.objects)
        if not call.objects.roots:
            self._forms[key] = form
        elif binding is not None:
            self._keep_settled(form, key, call, arguments)
        return result

    def _keep_settled(self, form: CallForm, key: Any, call: Call, arguments: Any) -> None:
        """Keep the form that a call has after its first run, which placed the arrays in its objects once and for all.

        Args:
          form: the one that it had before.
          key: of that form.
        """
        leaves, tree = jax.tree.flatten(arguments)
        found = form.inputs(arguments, leaves) if tree == key[0] else None
        if found is not None and list(map(leaf_type, found[0])) == list(map(leaf_type, call.leaves)):
            settled = CallForm(form.executable, found[0], tree, leaves, form.binding)
            self._forms[tree, key[1], key[2], self._looks(tree, leaves)] = settled

    def _is_cyclic(self, given: Sequence[Any], arguments: Any) -> bool:
        """Return whether objects refer to each other in a circle; looked up for the first calls, and for new objects.

        Args:
          given: the arguments themselves.
          arguments: their tree.
        """
        modules = [list(filter(is_module, jax.tree.leaves(x, is_leaf=is_unit))) for x in given]
        new = [x for held in modules for x in held if self._acyclic.get(id(x)) is not x]
        if self._forms and not new:
            self._plain.update(type(x) for x, held in zip(given, modules, strict=True) if not held)
            return False
        found = has_cycles(arguments)
        if not found:
            self._acyclic.update((id(x), x) for x in new)
        return found

    def _looks(self, tree: Any, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Return how the arguments of a call look, and where they lie if that pins them."""
        forms = leaf_forms(tree, leaves)
        return (*forms, *map(place_of, leaves)) if self.options.layouts.as_given else forms
