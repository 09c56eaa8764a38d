"""Training an ``md.Program``: its step planned, its state made or restored where the plan wants it, its batches fed.

    sharded = planned(program, mesh)
    state, outcome = train_program(sharded, program, Run(steps=300, folder=Path("runs/gpt")))

The step is ``step(*state, batch) -> (*state, loss)``; ``program.init`` makes the state.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from meshdsl.api import Program, Sharded, parallelize
from meshdsl.errors import ArgumentError, faults
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.rules import Rules
from meshdsl.training.batches import Batches
from meshdsl.training.checkpoint import State
from meshdsl.training.feed import placed_feed
from meshdsl.training.loop import Outcome, Run, resumed, train


def planned(program: Program, mesh: Mesh, rules: Rules | str | None = None, memory: str | None = None) -> Sharded:
    """The program's step over ``mesh``, its state donated.

    Args:
      rules: instead of the program's own.
      memory: limit per device, such as ``"60GiB"``; default is the topology's.
    """
    state = tuple(range(len(program.args) - 1))
    rules = program.rules if rules is None else rules
    return parallelize(program.step, mesh, program.layouts, rules=rules, memory=memory, donate_argnums=state)


def check_trainable(program: Program) -> None:
    """Refuse a program that lacks what training needs."""
    rows = [f"{name}: missing; {what}" for name, what in _NEEDED.items() if getattr(program, name) is None]
    if not rows:
        made = jax.eval_shape(made_by(program.init))
        made = made if isinstance(made, tuple) else (made,)
        if len(made) != len(program.args) - 1:
            rows.append(f"init: makes {len(made)} arguments; the step takes {len(program.args) - 1} and a batch")
    if rows:
        raise ArgumentError(faults("this program cannot be trained:", rows, "give them to md.Program"))


_NEEDED = {
    "init": "it makes the arguments before the batch",
    "batches": "it gives the batches, the step's last argument",
}


def steps_of(program: Program) -> int:
    """How many steps the program asks for."""
    if program.steps is None:
        raise ArgumentError("how many steps? The program says nothing: give --steps, or md.Program(..., steps=)")
    return program.steps


def train_program(sharded: Sharded, program: Program, run: Run) -> tuple[State, Outcome]:
    """Train as planned, from the newest checkpoint in the run's folder if there is one."""
    check_trainable(program)
    *state, example = program.args
    *places, batch_places = sharded.input_shardings(*program.args)[0]
    batches = made_by(program.batches)()
    if isinstance(batches, Batches):
        run = replace(run, unit=batches.unit, units=batches.units * batches.batch)
    like = jax.tree.map(_placed_shape, tuple(state), tuple(places))
    done, start = resumed(run, like) or (0, _made(sharded, program))
    return train(sharded, start, placed_feed(batches, example, batch_places), run, done, program.evaluate)


def made_by(make: Callable[..., Any] | None) -> Callable[..., Any]:
    """What the program makes; ``check_trainable`` has seen that it is there."""
    assert make is not None
    return make


def _made(sharded: Sharded, program: Program) -> State:
    made = sharded.init(made_by(program.init), program.args[-1])
    return made if isinstance(made, tuple) else (made,)


def _placed_shape(x: Any, at: jax.sharding.NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)
