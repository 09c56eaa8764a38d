"""An ``md.Program`` as it is planned over a mesh: its step, with the pins and rules that its file states."""

from meshdsl.api import Program, Sharded, parallelize
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.rules import Rules
from meshdsl.plan.value import Plan


def planned(
    program: Program,
    mesh: Mesh,
    rules: Rules | str | None = None,
    memory: str | None = None,
    plan: Plan | None = None,
) -> Sharded:
    """The program's step over ``mesh``; its state, all arguments but the last, is donated.

    Args:
      rules: instead of the program's own.
      memory: limit per device, such as ``"60GiB"``; default is the topology's.
      plan: run this plan instead of planning.
    """
    state = tuple(range(len(program.args) - 1))
    return parallelize(
        program.step,
        mesh,
        program.layouts,
        rules=program.rules if rules is None else rules,
        memory=memory,
        donate_argnums=state,
        plan=plan,
        pipeline=program.pipeline,
    )
