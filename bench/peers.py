"""The same GPT step under jax.jit: with handwritten shardings, and under the XLA partitioner at our plan's shardings.

A scheme maps the last names of a weight's path to its sharding. Optimizer state is sharded like its weight, so one
function serves both. As is common practice, the residual stream is constrained to the batch's sharding before and after
every block; other activations follow by propagation.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from bench.example_steps import load_example
from meshdsl.api import Program
from meshdsl.lowering.shardings import named_sharding
from meshdsl.plan.plan import Plan

Spec = tuple[Any, ...]  # per dim: a mesh axis, a tuple of them, or None
Scheme = Callable[[tuple[str, ...], tuple[int, ...]], Spec]

MEGATRON: dict[tuple[str, str], Spec] = {
    ("query", "kernel"): (None, "model", None),
    ("key", "kernel"): (None, "model", None),
    ("value", "kernel"): (None, "model", None),
    ("query", "bias"): ("model", None),
    ("key", "bias"): ("model", None),
    ("value", "bias"): ("model", None),
    ("out", "kernel"): ("model", None, None),
    ("up", "kernel"): (None, "model"),
    ("up", "bias"): ("model",),
    ("down", "kernel"): ("model", None),
}


def replicated(names: tuple[str, ...], shape: tuple[int, ...]) -> Spec:
    """Data parallelism: weights are replicated."""
    return (None,) * len(shape)


def fully_sharded(names: tuple[str, ...], shape: tuple[int, ...]) -> Spec:
    """FSDP: the largest dim of every weight over all devices, if it divides."""
    return _over_largest(replicated(names, shape), shape, ("data", "model"), 8)


def megatron(names: tuple[str, ...], shape: tuple[int, ...]) -> Spec:
    """Megatron tensor parallelism over ``model``, the vocabulary included."""
    if names[-1] == "embed":
        return ("model", None)
    spec = MEGATRON.get(names[-2:], ())
    return (None,) * (len(shape) - len(spec)) + spec  # stacked layers come first


def both(names: tuple[str, ...], shape: tuple[int, ...]) -> Spec:
    """Megatron over ``model``; the remaining dims of every weight sharded over ``data`` as in FSDP."""
    return _over_largest(megatron(names, shape), shape, "data", 4)


# name -> scheme of the weights, and the mesh axes that split the batch
SCHEMES: dict[str, tuple[Scheme, Any]] = {
    "data parallel": (replicated, ("data", "model")),
    "FSDP": (fully_sharded, ("data", "model")),
    "Megatron tensor parallel": (megatron, "data"),
    "FSDP + Megatron": (both, "data"),
}


def by_hand(mesh: jax.sharding.Mesh, name: str) -> tuple[Any, Any]:
    """Returns the jitted step under a handwritten scheme, and the shardings of its arguments."""
    scheme, batch = SCHEMES[name]
    program = _annotated(_sharding(mesh, (batch, None, None)))
    state = jax.tree_util.tree_map_with_path(
        lambda p, x: _sharding(mesh, scheme(_names(p), x.shape)), program.args[:-1]
    )
    inputs = jax.tree.map(lambda _: _sharding(mesh, (batch, None)), program.args[-1])
    return _jitted(program, (*state, inputs), (*state, _sharding(mesh, ()))), (*state, inputs)


def partitioned(program: Program, mesh: jax.sharding.Mesh, plan: Plan, donate: bool = True) -> tuple[Any, Any]:
    """Returns the step under the XLA partitioner at the plan's input and output layouts, and its input shardings."""
    tree = jax.tree.structure(program.args)
    inputs = jax.tree.unflatten(tree, [named_sharding(a.layout, len(a.shape), mesh) for a in plan.inputs])
    results = jax.tree.structure(jax.eval_shape(program.step, *program.args))
    outputs = jax.tree.unflatten(results, [named_sharding(a.layout, len(a.shape), mesh) for a in plan.outputs])
    return _jitted(program, inputs, outputs, donate), inputs


def _annotated(residual: NamedSharding) -> Program:
    """The GPT with its residual stream constrained to one sharding."""
    module = load_example("gpt")
    block, constrain = module.Block.__call__, jax.lax.with_sharding_constraint
    module.Block.__call__ = lambda self, x: constrain(block(self, constrain(x, residual)), residual)
    return module.program


def _jitted(program: Program, inputs: Any, outputs: Any, donate: bool = True) -> Any:
    donated = tuple(range(len(program.args) - 1)) if donate else ()
    return jax.jit(program.step, in_shardings=inputs, out_shardings=outputs, donate_argnums=donated)


def _over_largest(spec: Spec, shape: tuple[int, ...], axes: Any, size: int) -> Spec:
    free = [d for d, axis in enumerate(spec) if axis is None and shape[d] % size == 0 and shape[d] >= size]
    largest = max(free, key=lambda d: shape[d], default=None)
    return tuple(axes if d == largest else axis for d, axis in enumerate(spec))


def _names(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)


def _sharding(mesh: jax.sharding.Mesh, spec: Spec) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*spec))
