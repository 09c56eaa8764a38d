"""Executable: one plan on real devices, compiled once, called with flat arrays.

Arguments that already lie as planned are passed straight to the compiled program, which checks
them itself. Numpy arrays and uncommitted arrays are placed without a word; arrays committed to
another layout are moved, with one warning that says what it costs. Donated arguments are given up
as ``jax.jit`` does, also those that had to be moved first.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.sharding import NamedSharding, PartitionSpec

from meshdsl.errors import TraceError, shortened
from meshdsl.ir.graph import TracedProgram
from meshdsl.lowering.program import sharded_function
from meshdsl.lowering.shardings import input_layouts, output_layouts, place, shardings
from meshdsl.lowering.verify import ExpectedCommunication
from meshdsl.plan.op_times import plan_flops
from meshdsl.plan.plan import Plan
from meshdsl.trace.arguments import is_gone
from meshdsl.trace.diagnostics import PLANNED
from meshdsl.util.text import bytes_text

log = logging.getLogger("meshdsl")


class Executable:
    """A program under a plan, on the devices behind the plan's mesh.

    Args:
      donated: indices of flat inputs whose buffers the program may reuse.
      devices: as a mesh with the plan's axes.
    """

    def __init__(
        self, program: TracedProgram, plan: Plan, devices: jax.sharding.Mesh, donated: Sequence[int] = ()
    ) -> None:
        self.program, self.plan, self.devices, self.donated = program, plan, devices, tuple(donated)
        solution, graph = plan.solution, program.graph
        self.shardings = shardings(input_layouts(program, solution), graph.inputs, devices)
        self.results = shardings(output_layouts(program, solution), graph.returned, devices)
        self.function = sharded_function(program, solution, devices)
        self._weak = [leaf.weak for leaf in program.inputs]
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
        lowered: jax.stages.Lowered = self.jitted.lower(
            *(jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=at) for value, at in leaves)
        )
        return lowered

    @cached_property
    def compiled(self) -> jax.stages.Compiled:
        """The compiled step; it takes flat arrays that lie as planned, or nowhere yet."""
        return self.lowered.compile()

    @property
    def planned(self) -> ExpectedCommunication:
        """What the plan says that a compiled program can be judged by."""
        return ExpectedCommunication(
            self.plan.collectives, self.plan.memory, plan_flops(self.program, self.plan.solution)
        )

    @property
    def call(self) -> Callable[..., Any]:
        """The step to call: compiled ahead of time, but where jax would go wrong with that."""
        if _asked(_LOOKED_FOR):
            return self._looked_at
        return self.jitted if self._below_byte or _asked(("jax_disable_jit",)) else self.compiled

    def _looked_at(self, *leaves: jax.Array) -> list[jax.Array]:
        """The compiled step's results, none of them what jax looks for: it would go on op by op, without an end."""
        wrong = [test for name, test in _LOOKED_FOR.items() if _asked((name,))]
        with jax.debug_nans(False), jax.debug_infs(False):
            results: list[jax.Array] = self.compiled(*leaves)
            pairs = zip(self.program.outputs, results, strict=True)
            bad = [leaf.path or "the result" for leaf, x in pairs if any(_holds(test, x) for test in wrong)]
        if bad:
            raise FloatingPointError(f"{self.program.name} gives NaNs or infinities in {', '.join(shortened(bad))}")
        return results

    @cached_property
    def _below_byte(self) -> bool:
        """Whether elements have less than a byte: ahead of time jax mistakes how they lie in placed arrays."""
        return any(_below_byte(value.dtype) for value in self.program.inputs)

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """The step's result from its flat outputs."""
        return jax.tree.unflatten(self.program.out_tree, leaves)

    def knows(self, leaves: Sequence[Any]) -> bool:
        """Whether the compiled program, which checks all else, may take the arguments as they are.

        It does not see that a scalar was traced as a Python number or that a buffer is gone, nor give up buffers
        that are not placed yet.
        """
        if any(map(is_gone, leaves)):
            return False
        donated = (leaves[i] for i in self.donated)
        return list(map(_is_weak, leaves)) == self._weak and all(getattr(x, "committed", True) for x in donated)

    def run(self, leaves: Sequence[Any]) -> Any:
        """The step's result, with every argument placed first."""
        self._warn_of_moves(leaves)
        placed = place(leaves, self.shardings)
        result = self.unflatten(self.call(*placed))
        self._give_up(leaves, placed)
        return result

    def _give_up(self, leaves: Sequence[Any], placed: Sequence[jax.Array]) -> None:
        """Delete donated arguments whose placed copies the program has used up."""
        for i in self.donated:
            if isinstance(leaves[i], jax.Array) and placed[i].is_deleted() and not leaves[i].is_deleted():
                leaves[i].delete()

    def copies(self, leaves: Sequence[Any], whole: bool = False) -> list[jax.Array]:
        """Copies of the arguments, placed as planned or whole; donating them harms nobody.

        Whole is on one device, or on every one for a step that would not run on one.
        """
        fresh = [jnp.array(x, copy=True) for x in leaves]  # device_put may share buffers, whatever may_alias says
        every = NamedSharding(self.devices, PartitionSpec())
        alone = every if self.program.spread else self.devices.devices.flat[0]
        copied: list[jax.Array] = jax.device_put(fresh, alone if whole else list(self.shardings))
        return copied

    @cached_property
    def closes_over_tracers(self) -> bool:
        """Whether the step reads traced arrays of a function around it."""
        kept = (op.params.get("value") for op in self.program.graph.ops if op.name == "constant")
        return any(isinstance(array, jax.core.Tracer) for array in kept)

    def inline(self, leaves: Sequence[Any]) -> Any:
        """The step as part of an outer ``jax.jit``."""
        try:
            with jax.named_scope(PLANNED):
                return self.unflatten(guarded(self.function, self.program.name)(*leaves))
        except jax.errors.UnexpectedTracerError as error:
            raise TraceError(
                f"{self.program.name} reads a traced array of another function, which has ended\n"
                "return it from there, and pass it in"
            ) from error

    def _warn_of_moves(self, leaves: Sequence[Any]) -> None:
        pairs = enumerate(zip(leaves, self.shardings, strict=True))
        moved = [(i, x) for i, (x, at) in pairs if _lies_elsewhere(x, at)]
        if moved and not self._warned:
            self._warned = True
            size = sum(prod(x.shape) * x.dtype.itemsize for _, x in moved)
            path = self.program.inputs[moved[0][0]].path
            log.warning(
                "%s: %d arguments, %s first, are committed to another layout than planned; each call copies %s",
                *(self.program.name, len(moved), path, bytes_text(size)),
            )


def _lies_elsewhere(x: Any, target: NamedSharding) -> bool:
    return isinstance(x, jax.Array) and x.committed and not x.sharding.is_equivalent_to(target, x.ndim)


def _is_weak(x: Any) -> bool:
    return getattr(x, "weak_type", None) or isinstance(x, int | float | complex)


_LOOKED_FOR = {"jax_debug_nans": jnp.isnan, "jax_debug_infs": jnp.isinf}


def _asked(settings: Iterable[str]) -> bool:
    """Whether jax was asked for any of these."""
    return any(getattr(jax.config, name) for name in settings)


def _holds(test: Callable[[jax.Array], jax.Array], x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact) and bool(test(x).any())


def _below_byte(dtype: Any) -> bool:
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits < 8  # type: ignore[no-untyped-call, no-any-return]
    return bool(jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 8)


def guarded(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function, refusing to be differentiated or batched."""
    whole = jax.custom_jvp(lambda *leaves: _unbatched(function, name)(*leaves))

    @whole.defjvp
    def differentiate(primals: Any, tangents: Any) -> Any:
        raise TraceError(_refusal(name, "differentiated (jax.grad, jax.jvp, jax.vjp)", "take the gradient"))

    return whole


def _unbatched(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    whole = custom_vmap(lambda *leaves: tuple(function(*leaves)))

    @whole.def_vmap
    def batch(size: int, batched: Any, *leaves: Any) -> Any:
        raise TraceError(_refusal(name, "batched (jax.vmap)", "batch"))

    return whole


def _refusal(name: str, what: str, instead: str) -> str:
    return f"{name} is already planned and cannot be {what}\n{instead} inside the step, and parallelize that"
