"""A jitted function compiled for other devices than those that it names.

Its jaxpr names devices in the shardings and meshes of constraints and of inner ``jax.jit``. All are replaced by those
of a mesh of other devices, with the same axes; everything else stays as the user wrote it. The types of arrays in a
``jax.shard_map`` name kinds of devices, which cannot be replaced.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding

from meshdsl.errors import DeviceError, first_line


def compiled_elsewhere(traced: Any, compiled: Any, devices: Sequence[jax.Device]) -> jax.stages.Compiled:
    """Returns the program of a traced function for as many other devices.

    Args:
      traced: what ``jax.jit(step).trace`` returned.
      compiled: the same for the devices that it names; its inputs and outputs lie as they lie there.

    Raises:
      DeviceError: it has a ``jax.shard_map``, or does not fit the memory of the devices.
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
        why = "it has a jax.shard_map over a mesh of devices that are here"
        raise DeviceError(f"{traced.fun_name} cannot be compiled for other devices: {why}") from error
    except jax.errors.JaxRuntimeError as error:
        raise DeviceError(
            f"{traced.fun_name} is not compiled for {devices[0].device_kind}: {first_line(error)}"
        ) from error


def _replaced(x: Any, devices: Sequence[jax.Device]) -> Any:
    """A parameter of an equation, or a jaxpr, on other devices."""
    if isinstance(x, Mesh) and x.size == len(devices):
        return Mesh(np.array(devices).reshape(x.devices.shape), x.axis_names, axis_types=x.axis_types)
    if isinstance(x, NamedSharding) and isinstance(x.mesh, Mesh):
        return NamedSharding(_replaced(x.mesh, devices), x.spec, memory_kind=None)
    if isinstance(x, Jaxpr):  # from jax 0.12 on, a ClosedJaxpr is one
        return x.replace(eqns=[each.replace(params=_replaced(each.params, devices)) for each in x.eqns])
    if isinstance(x, ClosedJaxpr):
        return ClosedJaxpr(_replaced(x.jaxpr, devices), x.consts)
    if isinstance(x, Mapping):
        return {name: _replaced(each, devices) for name, each in x.items()}
    if type(x) in (tuple, list):
        return type(x)(_replaced(each, devices) for each in x)
    return x
