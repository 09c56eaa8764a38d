"""``Executable``: one plan on real devices, compiled once, called with flat arrays.

Arguments that are sharded as planned are passed straight to the compiled program, which checks them itself, and so are
numpy arrays. Uncommitted arrays are placed silently; arrays committed to another layout are moved, with one warning
that says what it costs. Donated arguments are deleted as ``jax.jit`` does, also those that were moved first.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from meshdsl.api.ambient import CALL_TESTS, JaxSettings, explicit_mesh, without_types
from meshdsl.errors import TraceError, shortened
from meshdsl.ir.graph import TracedProgram, element_bits
from meshdsl.lowering.program import sharded_function
from meshdsl.lowering.shardings import input_layouts, output_layouts, place, shardings
from meshdsl.lowering.verify import ExpectedCommunication
from meshdsl.plan.build import collectives_of
from meshdsl.plan.op_times import plan_flops
from meshdsl.plan.plan import Plan
from meshdsl.trace.diagnostics import PLANNED
from meshdsl.trace.objects import Objects, Writeback
from meshdsl.trace.platforms import idle_operations
from meshdsl.trace.static_leaves import has_static, reveal
from meshdsl.util.text import bytes_text

log = logging.getLogger("meshdsl")


class Executable:
    """A program under a plan, on the devices behind the plan's mesh.

    Args:
      devices: as a mesh with the plan's axes.
      donated: indices of flat inputs whose buffers the program may reuse.
      settings: of jax, under which the program was traced and is compiled; default is those set now.
    """

    def __init__(
        self,
        program: TracedProgram,
        plan: Plan,
        devices: jax.sharding.Mesh,
        donated: Sequence[int] = (),
        settings: JaxSettings | None = None,
    ) -> None:
        self.program, self.plan, self.devices, self.donated = program, plan, devices, tuple(donated)
        self.settings = settings or JaxSettings.current()
        solution, graph = plan.solution, program.graph
        self.shardings = shardings(input_layouts(program, solution), graph.inputs, devices)
        self.results = shardings(output_layouts(program, solution), graph.returned, devices)
        self.function = sharded_function(program, solution, devices)
        tree = program.out_tree
        self._has_static_results = has_static(tree.result.outer if isinstance(tree, Writeback) else tree)
        # makes the step's result of its outputs where ``finish`` has nothing else to do
        self.unflatten = None if isinstance(tree, Writeback) or self._has_static_results else tree.unflatten
        self._warned = False

    @cached_property
    def jitted(self) -> Any:
        """The step as one ``jax.jit`` over flat arrays."""
        name = self.program.name

        def step(*leaves: Any) -> Any:
            return self.function(*leaves)

        step.__name__ = step.__qualname__ = name
        return jax.jit(step, in_shardings=self.shardings, out_shardings=self.results, donate_argnums=self.donated)

    @cached_property
    def lowered(self) -> jax.stages.Lowered:
        """The step lowered for the shapes of the plan."""
        leaves = zip(self.program.graph.inputs, self.shardings, strict=True)
        shapes = [jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=at) for value, at in leaves]
        with self.settings.lowering():
            lowered: jax.stages.Lowered = self.jitted.lower(*shapes)
        return lowered

    @cached_property
    def compiled(self) -> jax.stages.Compiled:
        """The compiled step; it takes flat arrays that are sharded as planned, or uncommitted."""
        lowered = self.lowered
        with self.settings.lowering():
            return lowered.compile()

    @property
    def expected(self) -> ExpectedCommunication:
        """Collectives, memory and FLOPs of the plan, which a compiled program is verified against."""
        solution, platform = self.plan.solution, self.devices.devices.flat[0].platform
        idle = idle_operations(self.program.graph, platform)
        collectives = collectives_of(self.program, solution, idle) if idle else self.plan.collectives
        flops = plan_flops(self.program, solution)
        return ExpectedCommunication(
            collectives,
            self.plan.memory,
            flops,
            lambda: () if idle else self.plan.exposed,
            lambda: self.plan.simulated_seconds,
        )

    @property
    def call(self) -> Callable[..., Any]:
        """The function to call under the present settings of jax."""
        if _any_setting(CALL_TESTS):
            return self._tested_call
        if self._has_subbyte_dtype or _any_setting(("jax_disable_jit",)):
            return self._shielded_call
        return self.compiled

    def _shielded_call(self, *leaves: Any) -> list[jax.Array]:
        """Call the step where jax would not run a compiled program; it is compiled nevertheless."""
        with self.settings.lowering():
            results: list[jax.Array] = (self.jitted if self._has_subbyte_dtype else self.compiled)(*leaves)
        return results

    def _tested_call(self, *leaves: Any) -> list[jax.Array]:
        """Call the step and test its results for NaNs and infinities as jax's debug settings demand.

        jax itself would run the step again operation by operation, which has no end for a sharded program.
        """
        tests = [test for name, test in CALL_TESTS.items() if _any_setting((name,))]
        results = self._shielded_call(*leaves)
        with self.settings.lowering():
            pairs = zip(self.program.outputs, results, strict=True)
            bad = [leaf.path or "the result" for leaf, x in pairs if any(_holds(test, x) for test in tests)]
        if bad:
            raise FloatingPointError(f"{self.program.name} returns NaNs or infinities in {', '.join(shortened(bad))}")
        return results

    @cached_property
    def _has_subbyte_dtype(self) -> bool:
        """Whether elements are smaller than a byte: ahead of time, jax mistakes the layout of placed arrays."""
        return any(element_bits(leaf.dtype) < 8 for leaf in self.program.inputs)

    def finish(self, outputs: Sequence[Any], inputs: Sequence[Any], objects: Objects) -> Any:
        """Return the step's result from its outputs; the caller's objects get their new state.

        Args:
          inputs: what the step was called with.
          objects: of the call.
        """
        tree = self.program.out_tree
        result = tree.commit(objects, inputs, outputs) if isinstance(tree, Writeback) else tree.unflatten(outputs)
        return reveal(result) if self._has_static_results else result

    def moved(self, leaves: Sequence[Any]) -> list[int]:
        """Return which arguments are committed to another layout than planned."""
        pairs = enumerate(zip(leaves, self.shardings, strict=True))
        return [i for i, (x, at) in pairs if _is_placed_elsewhere(x, at)]

    def run(self, leaves: Sequence[Any], unplaced: Sequence[int], call: Callable[..., Any]) -> tuple[Any, list[Any]]:
        """Place some of the arguments as planned, call the step, and return its outputs, and what it was called with.

        Args:
          unplaced: indices of arguments that may have to be placed.
          call: what to call, see ``call``.
        """
        self._warn_of_moves(leaves)
        placed = list(leaves)
        copies = place([leaves[i] for i in unplaced], [self.shardings[i] for i in unplaced])
        for i, copy in zip(unplaced, copies, strict=True):
            placed[i] = copy
        outputs = call(*placed)
        for i in set(unplaced).intersection(self.donated):  # delete those whose copies the program has consumed
            if placed[i].is_deleted() and not leaves[i].is_deleted():
                leaves[i].delete()
        return outputs, placed

    def copies(self, leaves: Sequence[Any], whole: bool = False) -> list[jax.Array]:
        """Return copies of the arguments, sharded as planned, or whole; they can be donated safely.

        Whole copies are on one device, or replicated for a step that would not run on one device.
        """
        every = NamedSharding(explicit_mesh(self.devices, ()), PartitionSpec())
        alone = every if self.program.spread else self.devices.devices.flat[0]
        with self.settings.lowering():
            fresh = [_on_device(jnp.array(without_types(x), copy=True)) for x in leaves]  # device_put may share buffers
            copied: list[jax.Array] = jax.device_put(fresh, alone if whole else list(self.shardings))
        return copied

    @cached_property
    def closes_over_tracers(self) -> bool:
        """Whether the step closes over traced arrays of an enclosing function."""
        constants = (op.params.get("value") for op in self.program.graph.ops if op.name == "constant")
        return any(isinstance(array, jax.core.Tracer) for array in constants)

    def inline(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Return the outputs of the step as part of an outer ``jax.jit``."""
        try:
            with self.settings.lowering(), self._types(), jax.named_scope(PLANNED):
                if self.is_explicit:
                    leaves = [jax.sharding.reshard(x, at) for x, at in zip(leaves, self.shardings, strict=True)]
                outputs: Sequence[Any] = guarded(self.function, self.program.name)(*leaves)
                return [self._beside(leaves, j, x) for j, x in enumerate(outputs)]
        except jax.errors.UnexpectedTracerError as error:
            raise TraceError(
                f"{self.program.name} uses a traced array of another function, which has returned\n"
                "return it from there, and pass it in"
            ) from error

    def _beside(self, leaves: Sequence[Any], j: int, output: Any) -> Any:
        """Return a result in the memory where the outer function has the input that it replaces, as its loops need."""
        after, spaces = self.plan.outputs[j], jax.memory.Space
        if after.layout.memory != "host" or not after.follows:
            return output
        before = next(x for x, each in zip(leaves, self.plan.inputs, strict=True) if each.path == after.follows)
        return output if jax.typeof(before).memory_space == spaces.Host else jax.device_put(output, spaces.Device)

    @property
    def is_explicit(self) -> bool:
        """Whether shardings on the mesh are types."""
        return AxisType.Explicit in self.devices.axis_types

    def _types(self) -> AbstractContextManager[Any]:
        """Return a context in which arrays on the mesh have their shardings as types, if they are."""
        return jax.sharding.use_abstract_mesh(self.devices.abstract_mesh) if self.is_explicit else nullcontext()

    def _warn_of_moves(self, leaves: Sequence[Any]) -> None:
        moved = () if self._warned else self.moved(leaves)
        if moved:
            self._warned = True
            size = sum(prod(leaves[i].shape) * leaves[i].dtype.itemsize for i in moved)
            path = self.program.inputs[moved[0]].path
            log.warning(
                "%s: %d arguments, %s first, are committed to another layout than planned; each call copies %s",
                *(self.program.name, len(moved), path, bytes_text(size)),
            )


def _is_placed_elsewhere(x: Any, target: NamedSharding) -> bool:
    return isinstance(x, jax.Array) and x.committed and not x.sharding.is_equivalent_to(target, x.ndim)


def _on_device(x: jax.Array) -> jax.Array:
    """Return the array in the memory of its devices, which jax does not do together with a move to fewer devices."""
    if jax.typeof(x).memory_space != jax.memory.Space.Host:
        return x
    moved: jax.Array = jax.device_put(x, jax.memory.Space.Device)
    return moved


def _any_setting(settings: Iterable[str]) -> bool:
    """Return whether any of these settings of jax is on."""
    return any(getattr(jax.config, name) for name in settings)


def _holds(test: Callable[[jax.Array], jax.Array], x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact) and bool(test(x).any())


def guarded(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return the function, with a TraceError in place of differentiation and batching."""

    def refuse(what: str, instead: str) -> TraceError:
        return TraceError(
            f"{name} is already planned and cannot be {what}\n{instead} inside the step, and parallelize that"
        )

    unbatched = custom_vmap(lambda *leaves: tuple(function(*leaves)))

    @unbatched.def_vmap
    def batch(size: int, batched: Any, *leaves: Any) -> Any:
        raise refuse("batched (jax.vmap)", "batch")

    whole = jax.custom_jvp(lambda *leaves: unbatched(*leaves))

    @whole.defjvp
    def differentiate(primals: Any, tangents: Any) -> Any:
        raise refuse("differentiated (jax.grad, jax.jvp, jax.vjp)", "take the gradient")

    return whole
