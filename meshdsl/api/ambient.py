"""The ambient state of jax around a call: what it means for a step, and what it must not do to it.

    meaning   settings that change the program: x64, precision of products, promotion of dtypes and ranks, random bits.
              They are part of a call's kind, and all stages of that kind run under them, whenever they are computed.
    neutral   an ambient mesh, the default device, guards, debugging. Stages run as if there were none, so that these
              neither break planning, lowering and the unsharded reference nor leak into them. Only where the step is
              traced, an ambient mesh stays, so that the step may name its axes: of Auto axes, since jax states
              shardings of its own on Explicit ones; of Explicit axes if the step states what only these can hold.
    calls     what concerns a call itself holds for it: the guard of implicit transfers, tests for NaNs and infinities.

The planned program runs on a mesh of Auto axes. Where jax infers shardings as types (Explicit axes), arrays on such a
mesh do not mix with others; so if the ambient mesh, or that of an argument, is Explicit and otherwise the same, the
program runs on that one, and its results can be used beside the arguments.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding

T = TypeVar("T")
Context = Callable[[Any], AbstractContextManager[Any]]

# Settings that change a program, with the context manager that states each; jax has none for the last two.
MEANING: Mapping[str, Context | None] = {
    "jax_enable_x64": jax.enable_x64,
    "jax_default_matmul_precision": jax.default_matmul_precision,
    "jax_numpy_dtype_promotion": jax.numpy_dtype_promotion,
    "jax_numpy_rank_promotion": jax.numpy_rank_promotion,
    "jax_default_prng_impl": jax.default_prng_impl,
    "jax_enable_custom_prng": jax.enable_custom_prng,
    "jax_threefry_partitionable": jax.threefry_partitionable,
    "jax_softmax_custom_jvp": jax.softmax_custom_jvp,
    "jax_random_seed_offset": None,
    "jax_high_dynamic_range_gumbel": None,
}
# State that must not reach the stages, with the value that it has there.
NEUTRAL: Sequence[tuple[Context, Any]] = (
    (jax.disable_jit, False),  # it would unroll loops
    (jax.debug_nans, False),
    (jax.debug_infs, False),
    (jax.transfer_guard, "allow"),
    (jax.default_device, None),
)
# Rules for what users write; local programs mix dtypes and ranks as they like.
LENIENT: Sequence[tuple[Context, Any]] = (
    (jax.numpy_dtype_promotion, "standard"),
    (jax.numpy_rank_promotion, "allow"),
    (jax.debug_key_reuse, False),
)
CALL_TESTS: Mapping[str, Callable[[jax.Array], jax.Array]] = {"jax_debug_nans": jnp.isnan, "jax_debug_infs": jnp.isinf}

_NOT_AUTO = re.compile(  # in jax's ValueErrors
    r"axis names that are of type Auto|educed axes can only refer to|[Cc]ontext mesh .* should match"
)
_READ = {
    **MEANING,
    "jax_debug_nans": jax.debug_nans,
    "jax_debug_infs": jax.debug_infs,
    "jax_disable_jit": jax.disable_jit,
}
_STATES = [x for x in _READ.values() if hasattr(x, "value")]  # read there, in less Python than as attributes of config
_value = attrgetter("value")
_read_others = attrgetter(*(name for name, x in _READ.items() if not hasattr(x, "value")))


def call_settings() -> tuple[Any, ...]:
    """Return everything ambient that a call depends on, to be compared with that of another call."""
    return *map(_value, _STATES), *_read_others(jax.config), jax.sharding.get_abstract_mesh()


@dataclass(frozen=True)
class JaxSettings:
    """The settings of jax that change a program.

    Args:
      values: parallel to ``MEANING``.
      mesh: the ambient mesh; None if there is none.
    """

    values: tuple[Any, ...]
    mesh: jax.sharding.Mesh | AbstractMesh | None = None

    @classmethod
    def current(cls) -> "JaxSettings":
        """Return those that are set now."""
        return cls(attrgetter(*MEANING)(jax.config), _mesh_if_any())

    def differences(self, before: "JaxSettings") -> Iterator[str]:
        """Yield a line per setting that has another value than ``before``."""
        for name, now, then in zip(MEANING, self.values, before.values, strict=True):
            if now != then:
                yield f"{name} is {now!r} instead of {then!r}"
        if self.mesh != before.mesh:
            now, then = ("not set" if mesh is None else f"over {dict(mesh.shape)}" for mesh in (self.mesh, before.mesh))
            yield f"the ambient mesh is {now}, and was {then}"

    def run(self, f: Callable[[], T]) -> T:
        """Return ``f()``, run under these settings and no other ambient state: the user's step is traced so.

        The axes of the ambient mesh are Auto; if ``f`` states what only Explicit axes can hold, they are as they are.
        """
        auto = replace(self, mesh=_with_auto_axes(self.mesh))
        try:
            with auto.applied():
                return f()
        except ValueError as error:
            if auto == self or not _NOT_AUTO.search(str(error)):
                raise
        with self.applied():
            return f()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Run a block under these settings and no other ambient state."""
        with _within(self.mesh), _entered(zip(MEANING.values(), self.values, strict=True)), _entered(NEUTRAL):
            yield

    @contextmanager
    def lowering(self) -> Iterator[None]:
        """Run a block that traces programs of meshdsl's own: as ``applied``, without a mesh and rules of promotion."""
        with self.applied(), _within(None), _entered(LENIENT):
            yield


def _within(mesh: jax.sharding.Mesh | AbstractMesh | None) -> AbstractContextManager[Any]:
    """Return a context with this ambient mesh."""
    if isinstance(mesh, AbstractMesh):
        return jax.sharding.use_abstract_mesh(mesh)
    try:
        return jax.set_mesh(mesh)  # type: ignore[arg-type]
    except ValueError:  # inside of a trace only the abstract mesh can be set
        return jax.sharding.use_abstract_mesh(AbstractMesh((), ()) if mesh is None else mesh.abstract_mesh)


def _mesh_if_any() -> jax.sharding.Mesh | AbstractMesh | None:
    """Return the ambient mesh; in a trace, without its devices."""
    abstract = jax.sharding.get_abstract_mesh()
    if abstract.empty:
        return None
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:  # inside of a trace
        return abstract
    return None if mesh.empty else mesh


def _with_auto_axes(mesh: jax.sharding.Mesh | AbstractMesh | None) -> jax.sharding.Mesh | AbstractMesh | None:
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    return mesh and with_auto_axes(mesh)


def with_auto_axes(mesh: jax.sharding.Mesh) -> jax.sharding.Mesh:
    """Returns a mesh of the same devices and axes, all of them Auto."""
    return jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


@contextmanager
def _entered(contexts: Iterable[tuple[Context | None, Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context, value in contexts:
            if context is not None:
                stack.enter_context(context(value))
        yield


def explicit_mesh(devices: jax.sharding.Mesh, leaves: Iterable[Any]) -> jax.sharding.Mesh:
    """Return the mesh on which results can be used beside the arguments.

    Args:
      devices: the mesh of the plan, of Auto axes.
      leaves: the arguments.

    Returns:
      The ambient mesh, else that of an argument, if it has Explicit axes and is the same otherwise; else ``devices``.
    """
    placed = (x.sharding.mesh for x in leaves if isinstance(getattr(x, "sharding", None), NamedSharding))
    return next((mesh for mesh in (_ambient_mesh(devices), *placed) if _is_explicit_form(mesh, devices)), devices)


def typed_shape(x: Any, shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Return the shape of an argument with its sharding, if that is a part of its type: over Explicit axes."""
    at = explicit_type(x)
    if at is None:
        return shape
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, weak_type=shape.weak_type, sharding=at)


def explicit_type(x: Any) -> NamedSharding | None:
    """Return the sharding of an argument if that is a part of its type."""
    at = getattr(x, "sharding", None)
    return at if isinstance(at, NamedSharding) and AxisType.Explicit in at.mesh.axis_types else None


def without_types(x: Any) -> Any:
    """Return an array on a mesh of Explicit axes as one on a mesh of Auto axes; anything else as it is."""
    at = getattr(x, "sharding", None)
    if not isinstance(at, NamedSharding) or not isinstance(at.mesh, jax.sharding.Mesh):
        return x
    explicit = AxisType.Explicit in at.mesh.axis_types
    return jax.device_put(x, NamedSharding(with_auto_axes(at.mesh), at.spec)) if explicit else x


def _ambient_mesh(devices: jax.sharding.Mesh) -> jax.sharding.Mesh:
    """Return the ambient mesh; in a trace only its axes are known, and ``devices`` are taken if these are the same."""
    mesh = _mesh_if_any()
    if not isinstance(mesh, AbstractMesh):
        return mesh or devices
    if (mesh.axis_names, mesh.axis_sizes) != (devices.axis_names, devices.axis_sizes):
        return devices
    return jax.sharding.Mesh(devices.devices, devices.axis_names, axis_types=mesh.axis_types)


def _is_explicit_form(mesh: Any, devices: jax.sharding.Mesh) -> bool:
    """Whether a mesh has Explicit axes, and names, sizes and devices of another one."""
    if not isinstance(mesh, jax.sharding.Mesh) or AxisType.Explicit not in mesh.axis_types:
        return False
    return mesh.axis_names == devices.axis_names and bool(mesh.devices.tolist() == devices.devices.tolist())
