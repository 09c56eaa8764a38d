"""An ``md.Program`` as it is planned over a mesh: its step, with the pins and rules that its file states."""

from collections.abc import Mapping

from meshdsl.api import Program, Sharded, parallelize
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.rules import Rules
from meshdsl.plan.value import Plan
from meshdsl.stacks import AXIS, staged_layouts
from meshdsl.trace import trace


def planned(
    program: Program,
    mesh: Mesh,
    rules: Rules | str | None = None,
    memory: str | None = None,
    plan: Plan | None = None,
) -> Sharded:
    """The program's step over ``mesh``; its state, all arguments but the last, is donated.

    In a pipeline, stacks of layers lie on the mesh axis ``pipe`` where nothing else does.

    Args:
      rules: instead of the program's own.
      memory: limit per device, such as ``"60GiB"``; default is the topology's.
      plan: run this plan instead of planning.
    """
    stated = program.rules if rules is None else rules
    state = tuple(range(len(program.args) - 1))
    return parallelize(
        program.step,
        mesh,
        _layouts(program, mesh, stated),
        rules=stated,
        memory=memory,
        donate_argnums=state,
        plan=plan,
        pipeline=program.pipeline,
        overlap=program.overlap and plan is None,
    )


def _layouts(program: Program, mesh: Mesh, rules: Rules | str | None) -> Mapping[str, Layout | str] | None:
    if program.pipeline is None or program.pipeline.axis or AXIS not in mesh.names:
        return program.layouts
    own = Rules.of(rules or Rules())
    return staged_layouts(program, own, lambda: trace(program.step, program.args, inside=own.inside))
