"""A jitted function compiled for other devices than those that it names.

Its jaxpr names devices in the shardings and meshes of constraints and of inner ``jax.jit``. All are replaced by those
of a mesh of other devices, with the same axes; everything else stays as the user wrote it. In a ``jax.shard_map``,
types of values and the contexts of equations name kinds of devices, too.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, Literal, Var, jaxpr_as_fun
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from meshdsl.errors import DeviceError, first_line


def compiled_elsewhere(traced: Any, compiled: Any, devices: Sequence[jax.Device]) -> jax.stages.Compiled:
    """Returns the program of a traced function for as many other devices.

    Args:
      traced: what ``jax.jit(step).trace`` returned.
      compiled: the same for the devices that it names; its inputs and outputs lie as they lie there.

    Raises:
      DeviceError: it names devices in ways that cannot be replaced, or does not fit the memory of the devices.
    """

    def there(at: Any) -> Any:
        return _replaced(at, devices) if isinstance(at, NamedSharding) else None

    infos = jax.tree.leaves(traced.args_info)
    placed = jax.tree.map(
        lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there(at)),
        traced.args_info,
        compiled.input_shardings,
    )
    shapes = jax.tree.leaves(placed)
    function = jaxpr_as_fun(_replaced(traced.jaxpr, devices))
    ends = [there(at) for at in jax.tree.leaves(compiled.output_shardings)]
    donated = [i for i, x in enumerate(infos) if x.donated]
    try:
        return jax.jit(function, out_shardings=ends, donate_argnums=donated).lower(*shapes).compile()
    except ValueError as error:
        if "mesh" not in str(error):
            raise
        why = f"it names devices that are here: {first_line(error)}"
        raise DeviceError(f"{traced.fun_name} cannot be compiled for other devices: {why}") from error
    except jax.errors.JaxRuntimeError as error:
        raise DeviceError(
            f"{traced.fun_name} is not compiled for {devices[0].device_kind}: {first_line(error)}"
        ) from error


def _replaced(x: Any, devices: Sequence[jax.Device]) -> Any:
    """A parameter of an equation, or a jaxpr, on other devices."""
    if isinstance(x, Mesh) and x.size == len(devices):
        return Mesh(np.array(devices).reshape(x.devices.shape), x.axis_names, axis_types=x.axis_types)
    if isinstance(x, AbstractMesh) and x.size == len(devices):
        there = Mesh(np.array(devices).reshape(x.axis_sizes), x.axis_names, axis_types=x.axis_types)
        return there.abstract_mesh
    if isinstance(x, NamedSharding):
        return NamedSharding(_replaced(x.mesh, devices), x.spec, memory_kind=None)
    if isinstance(x, Jaxpr):  # from jax 0.12 on, a ClosedJaxpr is one
        return _JaxprElsewhere(devices).of(x)
    if isinstance(x, ClosedJaxpr):
        return ClosedJaxpr(_replaced(x.jaxpr, devices), x.consts)
    if isinstance(x, Mapping):
        return {name: _replaced(each, devices) for name, each in x.items()}
    if type(x) in (tuple, list):
        return type(x)(_replaced(each, devices) for each in x)
    return x


class _JaxprElsewhere:
    """Rewrites one jaxpr: the types of its values name kinds of devices where they lie in a ``jax.shard_map``."""

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        self._devices = devices
        self._made: dict[Any, Any] = {}

    def of(self, jaxpr: Jaxpr) -> Jaxpr:
        """Returns the same jaxpr, its values of other types and its equations in the context of the other mesh."""
        heads = {name: self._atoms(getattr(jaxpr, name)) for name in ("constvars", "invars")}
        equations = [
            each.replace(
                params=_replaced(each.params, self._devices),
                invars=self._atoms(each.invars),
                outvars=self._atoms(each.outvars),
                ctx=self._context(each.ctx),
            )
            for each in jaxpr.eqns
        ]
        found: Jaxpr = jaxpr.replace(**heads, eqns=equations, outvars=self._atoms(jaxpr.outvars))
        return found

    def _atoms(self, atoms: Sequence[Any]) -> list[Any]:
        return [self._atom(each) for each in atoms]

    def _atom(self, atom: Any) -> Any:
        at = getattr(atom.aval, "sharding", None)
        if not isinstance(at, NamedSharding) or not isinstance(at.mesh, AbstractMesh) or at.mesh.empty:
            return atom
        aval = atom.aval.update(sharding=_replaced(at, self._devices))
        if isinstance(atom, Literal):
            return Literal(atom.val, aval)
        if atom not in self._made:
            self._made[atom] = DropVar(aval) if isinstance(atom, DropVar) else Var(aval)
        return self._made[atom]

    def _context(self, context: Any) -> Any:
        """The context of an equation whose mesh is another: that of one traced there."""
        mesh = context.cur_abstract_mesh
        if mesh.empty:
            return context
        with jax.sharding.use_abstract_mesh(_replaced(mesh, self._devices)):
            return jax.make_jaxpr(lambda x: x + 1)(0.0).jaxpr.eqns[0].ctx
