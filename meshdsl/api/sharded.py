"""parallelize: a step of ordinary JAX, planned over a mesh and run as planned.

    sharded = parallelize(step, Mesh(data=4, model=2), layouts={"batch": "data=S(0)"})
    print(sharded.plan(params, batch))       # nothing is compiled, no devices are needed
    params = sharded(params, batch)          # runs exactly that plan

What a call goes through is kept for the next call like it, see ``meshdsl.api.stages``.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar

import jax

from meshdsl.api.executable import Executable
from meshdsl.api.explain import Explanation, explain
from meshdsl.api.options import Options, parse_options, parse_pin_changes, settings
from meshdsl.api.stages import StageCache, Stages
from meshdsl.layouts.axis_rules import Rules
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.aot_targets import parse_target
from meshdsl.lowering.numerics import (
    NUDGES,
    CheckReport,
    check_numbers,
    check_tolerance,
    perturb,
    rounding,
    widened_step,
)
from meshdsl.lowering.verify import VerifyReport, verify_here, verify_target
from meshdsl.pipelining import whole_function
from meshdsl.plan.plan import Plan
from meshdsl.schedules.spec import Pipeline
from meshdsl.trace import Call
from meshdsl.trace.arguments import check_values, step_name

__all__ = ["Options", "Sharded", "parallelize"]

Params = ParamSpec("Params")
Result = TypeVar("Result")


def parallelize(
    step: Callable[Params, Result],
    mesh: Mesh | str,
    layouts: Mapping[str, Layout | str] | None = None,
    outputs: Mapping[str, Layout | str] | None = None,
    memory: str | float | None = None,
    donate_argnums: int | Iterable[int] = (),
    donate_argnames: str | Iterable[str] = (),
    static_argnums: int | Iterable[int] = (),
    static_argnames: str | Iterable[str] = (),
    plan: Plan | None = None,
    devices: Sequence[jax.Device] | None = None,
    rules: Rules | str | None = None,
    pipeline: Pipeline | None = None,
    overlap: bool = False,
    time_limit: float | None = None,
) -> "Sharded[Params, Result]":
    """The step as a function that is planned over ``mesh`` and runs as planned.

    Args:
      step: a function of pytrees of arrays, as ``jax.jit`` takes it.
      mesh: a mesh, or its text ``"data=4,model=2"``; the topology is then that of ``plan``, or ``cpu``.
      layouts: pins by globs over argument names and tree paths; axes not named are free.
      outputs: pins by globs over the results' paths; others follow the inputs they replace.
      rules: mesh axes by named dims, ``"batch:data hidden:model"``; where ``layouts`` names an axis too, that decides.
      memory: limit per device, bytes or text such as ``"60GiB"``; default is the topology's.
      donate_argnums: arguments whose buffers the step may reuse, as in ``jax.jit``.
      donate_argnames: the same by name.
      static_argnums: arguments that are no arrays, as in ``jax.jit``.
      static_argnames: the same by name.
      plan: run this plan, a loaded one say, instead of planning; mesh, topology, memory and pins have to agree with it.
      devices: the devices of the mesh, outermost axis first; default is the first of all.
      pipeline: take the batch in microbatches, through stages where layers are split; default is as ``plan`` does.
      overlap: of the plans found when what can be sent beside the computation costs less, take the one with the least
        ``plan.simulated_seconds``; default is the one with the least ``plan.seconds``, one thing after the other.
      time_limit: seconds of planning after which nothing more is tried to improve the plan and its bound; the plan
        says so, with its gap. Default is none: work is limited in any case, and the plan is always the same.

    Raises ArgumentError, listing all arguments that are not of these kinds.
    """
    options = parse_options(
        step,
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
    )
    return Sharded(step, options)


class Sharded(Generic[Params, Result]):
    """A planned step; call it as the step itself, whose name and documentation it has."""

    def __init__(self, step: Callable[Params, Result], options: Options) -> None:
        update_wrapper(self, step, updated=())
        self.step, self.options = step, options
        self.kept = StageCache(step, options)
        self._recent: dict[Any, Executable] = {}
        self._has_static = bool(options.static_argnums or options.static_argnames)

    def __call__(self, *args: Params.args, **kwargs: Params.kwargs) -> Result:
        """Run the step; arguments are placed where the plan wants them."""
        if self._has_static:
            return self._run(self.kept.call(args, kwargs))
        leaves, tree = jax.tree.flatten((args, kwargs))
        executable = self._recent.get((tree, settings()))
        if executable is not None and executable.knows(leaves):
            try:  # the compiled program checks shapes, dtypes and shardings faster than we could
                result: Result = executable.unflatten(executable.call(*leaves))
                return result
            except (TypeError, ValueError):
                pass
        return self._run(self.kept.call(args, kwargs), tree)

    def __repr__(self) -> str:
        return f"<{step_name(self.step)} on mesh {self.options.mesh}>"

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for arguments like these: arrays or ``jax.ShapeDtypeStruct``."""
        return self.kept.plan(self.kept.call(args, kwargs))[1]

    def with_pins(self, layouts: Mapping[str, Layout | str | None]) -> "Sharded[Params, Result]":
        """The same step under other pins, planned in a fraction of the time, from where this one's plan was found.

        It is not traced again and shares all tables, but its plan is not taken through rounds, so ``plan.gap`` may be
        larger than that of a step that is parallelized anew.

        Args:
          layouts: pins by globs as ``parallelize`` takes them; one of the same glob is replaced, None takes it out.

        Raises ArgumentError for what is no pin, and for a glob to take out that there is not.
        """
        changed = parse_pin_changes(layouts, self.options.layouts)
        other = Sharded(self.step, replace(self.options, plan=None, layouts=changed))
        other.kept = StageCache(self.step, other.options, like=self.kept)
        return other

    pinned = with_pins  # an alias

    def explain(self, path: str, *args: Any, **kwargs: Any) -> Explanation:
        """Why the input at ``path`` has its layout: what every other would cost, each planned in full."""
        call = self.kept.call(args, kwargs)
        program, plan = self.kept.trace(call), self.kept.plan(call)[1]

        def replan(layout: Layout) -> Plan:
            options = replace(self.options, plan=None, layouts={**self.options.layouts, path: layout})
            return Stages(self.step, options).plan(program)[1]

        return explain(plan, path, replan)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """The lowered program, as ``jax.jit(step).lower`` gives it, over flat arguments."""
        return self.kept.executable(self.kept.call(args, kwargs)).lowered

    def init(self, make: Callable[[], Any], *rest: Any, **kwargs: Any) -> Any:
        """The first arguments of the step, made where the plan wants them: no device holds more than its part.

        Args:
          make: makes them, one or a tuple of several, of nothing.
          rest: the other arguments, arrays or ``jax.ShapeDtypeStruct``; keywords as well.
        """
        made = jax.eval_shape(make)
        several = isinstance(made, tuple)
        first = made if several else (made,)
        places = self.input_shardings(*first, *rest, **kwargs)[0][: len(first)]
        return jax.jit(make, out_shardings=places if several else places[0])()

    def input_shardings(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Where the step takes its arguments: ``args`` and ``kwargs`` with a ``NamedSharding`` for each array.

        Arguments that lie so are passed on as they are, others are placed at each call.
        """
        call = self.kept.call(args, kwargs)
        places = self.kept.executable(call).shardings
        return call.args(places), call.kwargs(places)

    def verify(self, *args: Any, target: str | None = None, **kwargs: Any) -> VerifyReport:
        """Compare the compiled collectives with the planned ones, and show memory and FLOPs of both.

        Args:
          target: devices to compile for that are not there, such as ``"tpu-v5e:4x4"`` (needs ``libtpu``); default is
            those at hand. Its compiler may rewrite collectives, so the program is compared as it is lowered.

        Raises VerifyError if they differ or the target's memory does not suffice, DeviceError for a target that there
        is not, that has another number of devices, or whose compiler is not installed.
        """
        call = self.kept.call(args, kwargs)
        if target is None:
            executable = self.kept.executable(call)
            return verify_here(executable.planned, executable.compiled, executable.plan.mesh)
        found = parse_target(target)
        executable = self.kept.on(call, found.devices(self.options.mesh))
        return verify_target(executable.planned, executable.lowered, executable.plan.mesh, found)

    def check(self, *args: Any, tolerance: float | None = None, **kwargs: Any) -> CheckReport:
        """Run one step sharded and unsharded, on copies; CheckError if a result differs."""
        check_tolerance(tolerance)
        call = self.kept.call(args, kwargs)
        check_values(call.name, call.paths, call.leaves)
        executable = self.kept.executable(call)
        jitted = jax.jit(self._reference(call))

        def alone(leaves: Sequence[Any]) -> list[Any]:
            results = jitted(*executable.copies(leaves, whole=True))
            return jax.tree.leaves(jax.block_until_ready(results))  # beside it, collectives may wait for ever (CPU)

        def nudged() -> Iterator[list[Any]]:
            least = rounding(executable.program)
            return (alone([perturb(x, seed, least) for x in call.leaves]) for seed in range(NUDGES))

        def widened() -> list[Any] | None:
            step = widened_step(self.kept.trace(call))
            return step and jax.block_until_ready(jax.jit(step)(*executable.copies(call.leaves, whole=True)))

        expected, got = alone(call.leaves), executable.call(*executable.copies(call.leaves))
        paths = [leaf.path for leaf in executable.program.outputs]
        return check_numbers(expected, got, paths, tolerance, nudged, widened)

    def _reference(self, call: Call) -> Callable[..., Any]:
        """What the planned step is compared with, on flat arrays."""
        if self.options.pipeline and self.options.pipeline.per_microbatch:
            return whole_function(self.kept.trace(call).graph)
        return lambda *leaves: self.step(*call.args(leaves), **call.kwargs(leaves))

    def _run(self, call: Call, tree: Any = None) -> Result:
        check_values(call.name, call.paths, call.leaves)
        executable = self.kept.executable(call)
        if executable.closes_over_tracers or any(isinstance(x, jax.core.Tracer) for x in call.leaves):
            inlined: Result = executable.inline(call.leaves)
            return inlined
        if tree is not None:
            self._recent[tree, settings()] = executable
        result: Result = executable.run(call.leaves)
        return result
