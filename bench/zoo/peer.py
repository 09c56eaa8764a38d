"""The XLA partitioner on a case: at given layouts, and at layouts of its own choice."""

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from bench.peers import partitioned
from meshdsl.api import Program
from meshdsl.errors import CheckError
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import B, S
from meshdsl.lowering.numerics import check_numbers
from meshdsl.lowering.shardings import device_mesh
from meshdsl.plan.plan import Plan


def at_layouts(program: Program, plan: Plan) -> tuple[Any, Any]:
    """Returns the step compiled at a plan's input and output layouts, and the shardings of its arguments."""
    jitted, shardings = partitioned(program, device_mesh(plan.mesh), plan)
    return jitted.lower(*program.args).compile(), shardings


def xla_layouts(program: Program, mesh: Mesh, dim: int) -> tuple[Any, list[Layout], list[Layout]]:
    """Returns the step compiled with only the batch sharded, and the input and output layouts that XLA chose."""
    batch = NamedSharding(device_mesh(mesh), PartitionSpec(*(None,) * dim, mesh.names[0]))
    free = (None,) * (len(program.args) - 1)
    compiled = jax.jit(program.step, in_shardings=(*free, batch), keep_unused=True).lower(*program.args).compile()
    return compiled, *chosen_layouts(compiled, mesh)


def chosen_layouts(compiled: Any, mesh: Mesh) -> tuple[list[Layout], list[Layout]]:
    """Returns the layouts of inputs and outputs that XLA chose in a compiled step."""
    inputs, outputs = (jax.tree.leaves(each) for each in (compiled.input_shardings[0], compiled.output_shardings))
    return [_layout(x, mesh) for x in inputs], [_layout(x, mesh) for x in outputs]


def _layout(sharding: NamedSharding, mesh: Mesh) -> Layout:
    """Returns the layout of a sharding, with every mesh axis explicit."""
    entries = ((entry,) if isinstance(entry, str) else entry or () for entry in sharding.spec)
    split = {axis: S(d) for d, axes in enumerate(entries) for axis in axes}
    return Layout(**split, **{axis: B for axis in mesh.names if axis not in split})


def numbers_agree(expected: Any, got: Any) -> bool:
    """Whether the results equal those of the unsharded step, within tolerance."""
    expected, got = jax.tree.leaves(expected), jax.tree.leaves(got)
    try:
        check_numbers(expected, got, [str(i) for i in range(len(got))])
    except CheckError:
        return False
    return True
