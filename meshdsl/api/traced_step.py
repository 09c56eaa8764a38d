"""A jitted function of others, traced and compiled for some arguments, and the same step to plan."""

import inspect as python_inspect
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, jaxpr_as_fun
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jax.sharding import Mesh as JaxMesh
from jax.tree_util import keystr, tree_leaves_with_path

from meshdsl.api.sharded import Sharded, parallelize
from meshdsl.errors import ArgumentError, is_a
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import B
from meshdsl.lowering.partitioner import CompiledModules, compiled_modules
from meshdsl.pins import AS_GIVEN
from meshdsl.plan.types import Array
from meshdsl.shardings import HOST_KIND, axes_of, layout_over
from meshdsl.trace.read_jaxpr import inner_jaxprs


class OneDeviceError(ArgumentError):
    """A function runs on one device, so that there is nothing to inspect."""


def _has_shard_map(jaxpr: Jaxpr) -> bool:
    return any(eqn.primitive.name == "shard_map" or any(map(_has_shard_map, inner_jaxprs(eqn))) for eqn in jaxpr.eqns)


@dataclass(frozen=True, eq=False)
class TracedStep:
    """A jitted function, traced and compiled for some arguments."""

    name: str
    traced: Any
    lowered: Any
    compiled: Any
    parameters: tuple[str, ...]

    @classmethod
    def of(cls, step: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "TracedStep":
        """Trace and compile a jitted function; ArgumentError if it is none."""
        if isinstance(step, Sharded):
            raise ArgumentError("inspect reads programs of jax.jit; of this one, plan and verify say the same and more")
        args, kwargs = _on_devices((args, kwargs))
        traced, is_own = _traced(step, args, kwargs)
        try:
            names = tuple(python_inspect.signature(step).parameters) if is_own else ()
        except (TypeError, ValueError):
            names = ()
        if len(traced.args_info[0]) < len(args):  # static ones are left out, and jax does not say which
            names = ()
        lowered = traced.lower()
        name = traced.fun_name if is_own else getattr(step, "__name__", traced.fun_name)
        return cls(name, traced, lowered, lowered.compile(), names)

    @cached_property
    def modules(self) -> CompiledModules:
        """The program before and after partitioning, and as it runs; it is compiled once more for them."""
        return compiled_modules(self.lowered)

    @cached_property
    def shapes(self) -> list[Any]:
        """The arguments, flat, with the shardings in which they are compiled."""
        placed = jax.tree.map(  # None for what the step does not use
            lambda x, at: replace_sharding(x, at if isinstance(at, NamedSharding) else None),
            self.traced.args_info,
            self.compiled.input_shardings,
        )
        return jax.tree.leaves(placed)

    @cached_property
    def gathered_shapes(self) -> "GatheredShapes":
        """The shapes of arguments that are gathered over some axes."""
        return GatheredShapes([(x.shape, x.sharding) for x in self.shapes if x.sharding is not None])

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
    def has_shard_map(self) -> bool:
        """Whether parts of it are for one device, which name axes of the mesh."""
        return _has_shard_map(self.traced.jaxpr.jaxpr)

    @property
    def size(self) -> int:
        """The number of devices."""
        return max((at.num_devices for at in self._ends), default=1)

    @property
    def _ends(self) -> list[Any]:
        """The shardings of arguments and results."""
        return jax.tree.leaves((self.compiled.input_shardings, self.compiled.output_shardings))

    def planned(self, mesh: Mesh, free_ends: bool = False) -> tuple[Sharded[..., Any], tuple[Any, ...]]:
        """The same step to plan, free between the inputs and outputs as they lie, and its arguments.

        Args:
          mesh: with the topology to plan for.
          free_ends: whether arguments and results that lie whole on every device are free as well.
        """
        leaves = [replace_sharding(x, None) if free_ends and is_whole(x.sharding) else x for x in self.shapes]
        arguments = self._named(leaves)
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
        ends = zip(paths, self.results, jax.tree.leaves(self.traced.out_info), strict=True)
        pins = {
            path: _lies(mesh, at, len(x.shape))
            for path, at, x in ends
            if isinstance(at, NamedSharding) and not (free_ends and is_whole(at))
        }
        return parallelize(step, mesh, AS_GIVEN, outputs=pins, constraints="ignore"), args

    def _named(self, leaves: list[Any]) -> dict[str, Any]:
        """The arguments by name, with these leaves."""
        given, keywords = jax.tree.unflatten(jax.tree.structure(self.traced.args_info), leaves)
        names = [name for name in self.parameters if name not in keywords]
        names += [f"argument_{i}" for i in range(len(names), len(given))]
        return {**dict(zip(names, given, strict=False)), **dict(sorted(keywords.items()))}

    def arrays(self, mesh: Mesh) -> tuple[list[Array], list[Array]]:
        """The arguments and results as they lie; those that lie on no mesh of these axes are whole."""

        def array(path: str, x: Any, at: Any) -> Array:
            on_axes = isinstance(at, NamedSharding) and {*at.mesh.axis_names} >= {*mesh.names}
            known = _lies(mesh, at, len(x.shape)) if on_axes else Layout()
            order = [*known.axes, *(axis for axis in mesh.names if axis not in known.axes)]
            layout = Layout(**{axis: known.on(axis) or B for axis in order}).within(known.memory)
            return Array(path, tuple(x.shape), str(x.dtype), layout)

        inputs = [
            array("/".join(filter(None, (name, keystr(path, simple=True, separator="/")))), x, x.sharding)
            for name, tree in self._named(self.shapes).items()
            for path, x in tree_leaves_with_path(tree)
        ]
        leaves = zip(tree_leaves_with_path(self.traced.out_info), self.results, strict=True)
        return inputs, [array(keystr(path, simple=True, separator="/"), x, at) for (path, x), at in leaves]

    @property
    def results(self) -> list[Any]:
        """The shardings of the results, flat."""
        return jax.tree.leaves(self.compiled.output_shardings)


def _lies(mesh: Mesh, at: NamedSharding, rank: int) -> Layout:
    """The layout of a compiled argument or result; memories other than the host's are the device's."""
    return layout_over(mesh, at, rank).within("host" if at.memory_kind == HOST_KIND else "")


def _on_devices(arguments: Any) -> Any:
    """Arguments whose shapes lie on an abstract mesh as shapes on the devices at hand.

    Raises:
      ArgumentError: there are too few.
    """

    def is_abstract(x: Any) -> bool:
        at = x.sharding if isinstance(x, jax.ShapeDtypeStruct) else None
        return isinstance(at, NamedSharding) and isinstance(at.mesh, AbstractMesh)

    def placed(x: Any) -> Any:
        if not is_abstract(x):
            return x
        at = x.sharding
        mesh, here = at.mesh, jax.devices()
        if mesh.size > len(here):
            raise ArgumentError(
                f"arguments lie on a mesh of {mesh.size} devices, and {len(here)} are here: first of all "
                f'jax.config.update("jax_num_cpu_devices", {mesh.size}) makes virtual ones, for a target, too'
            )
        devices = np.array(here[: mesh.size]).reshape(mesh.axis_sizes)
        there = JaxMesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
        placed = NamedSharding(there, at.spec, memory_kind=at.memory_kind)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed, weak_type=x.weak_type)

    found = any(map(is_abstract, jax.tree.leaves(arguments)))
    return jax.tree.map(placed, arguments) if found else arguments  # objects stay the same ones


def _traced(step: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[jax.stages.Traced, bool]:
    """A jitted function, traced, and whether its arguments are those of the call.

    Wrappers of libraries (``flax.nnx.jit``, ``equinox.filter_jit``) hold a function of ``jax.jit``, and call it with
    arguments of their own making.

    Raises:
      ArgumentError: it is not jitted.
    """
    if hasattr(step, "trace"):
        found = step.trace(*args, **kwargs)
        if isinstance(found, jax.stages.Traced):
            return found, True
        inner = [x for x in vars(found).values() if isinstance(x, jax.stages.Traced)]
        if inner:
            return inner[0], False
    held = [name for name, x in getattr(step, "__dict__", {}).items() if hasattr(x, "trace") and hasattr(x, "lower")]
    if held and hasattr(step, "lower"):
        wrapper, tracer = copy(step), _Tracer(getattr(step, held[0]))
        object.__setattr__(wrapper, held[0], tracer)
        wrapper.lower(*args, **kwargs)
        if tracer.traced is not None:
            return tracer.traced, False
    kind = getattr(step, "__name__", "") or is_a(step)
    raise ArgumentError(f"step={kind} is not jitted: give jax.jit({kind}, in_shardings=...), as it is called")


class _Tracer:
    """Stands for the jitted function in a wrapper, and keeps what it is traced as."""

    def __init__(self, jitted: Any) -> None:
        self._jitted = jitted
        self.traced: jax.stages.Traced | None = None

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Traces and lowers the function."""
        self.traced = self._jitted.trace(*args, **kwargs)
        return self.traced.lower()


class GatheredShapes:
    """Of arguments, what one device has of them when they are gathered over some mesh axes.

    Args:
      arguments: shapes and shardings.
    """

    def __init__(self, arguments: Sequence[tuple[tuple[int, ...], NamedSharding]]) -> None:
        self._arguments = [(shape, at) for shape, at in arguments if len(shape) > 1]
        self._known: dict[frozenset[str], frozenset[tuple[int, ...]]] = {}

    def over(self, axes: Collection[str]) -> frozenset[tuple[int, ...]]:
        """The shapes of those that lie split over any of the axes."""
        gathered = frozenset(axes)
        if gathered not in self._known:
            split = ((shape, at) for shape, at in self._arguments if gathered & set(axes_of(at)))
            self._known[gathered] = frozenset(_without(at, gathered).shard_shape(shape) for shape, at in split)
        return self._known[gathered]


def _without(at: NamedSharding, axes: frozenset[str]) -> NamedSharding:
    entries = ((entry,) if isinstance(entry, str) else entry or () for entry in at.spec.partitions)
    return NamedSharding(at.mesh, PartitionSpec(*(tuple(a for a in entry if a not in axes) for entry in entries)))


def is_whole(at: Any) -> bool:
    """Whether an array lies whole on every device."""
    return isinstance(at, NamedSharding) and at.is_fully_replicated


def replace_sharding(x: Any, at: Any) -> jax.ShapeDtypeStruct:
    """A shape that lies elsewhere."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)
