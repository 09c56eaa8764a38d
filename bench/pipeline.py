"""Pipelines: predicted and measured step time and memory, against no pipeline and against a rolled buffer.

python -m bench.pipeline --rounds 10 writes the tables of docs/pipelines.md and its picture.

A decoder in plain JAX, its layers in a scan, on 8 virtual CPU devices. ``bench/rolled_buffer.py`` implements pipelining
as MaxText does; its losses are compared with ours before anything is timed.
"""

import argparse
import time
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import meshdsl as md
from bench import pipeline_page as page
from bench.report import interleave, ratio, table
from bench.rolled_buffer import DATA, STAGES, Peer, Sizes, arguments, step
from meshdsl.calibrate import calibrate
from meshdsl.layouts.topology import Topology
from meshdsl.util.text import bytes_text

NOTHING, PEER = "no pipeline, data=8", "rolled buffer + autodiff (peers)"
SCHEDULES = {"gpipe": ("gpipe", 1), "1f1b": ("1f1b", 1), "interleaved x2": ("interleaved", 2), "zb": ("zb", 1)}


class Ours:
    """A planned step: a schedule over the stages, or the data alone."""

    def __init__(self, sizes: Sizes, topology: Topology, schedule: str | None) -> None:
        self.sizes, self.args = sizes, arguments(sizes)
        axes = {"data": DATA * STAGES} if schedule is None else {"pipe": STAGES, "data": DATA}
        layouts = {"batch/*": "data=S(0)"} | ({"params/layers/*": "pipe=S(0)"} if schedule else {})
        asked = md.Pipeline(sizes.microbatches, *SCHEDULES[schedule]) if schedule else None
        mesh = md.Mesh(topology=topology, **axes)
        self.sharded = md.parallelize(step, mesh, layouts, donate_argnums=0, pipeline=asked)
        self.plan = self.sharded.plan(*self.args)
        self.places = self.sharded.input_shardings(*self.args)[0]

    @cached_property
    def compiled(self) -> Any:
        """Compiled; ``seconds`` says how long that took."""
        start = time.perf_counter()
        found = self.sharded.lower(*self.args).compile()
        self.seconds = time.perf_counter() - start
        return found


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--memory", action="store_true", help="only how memory grows with the microbatches")
    asked = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    parts = {"memory": ""} if asked.memory else {"machine": page.circumstances(), "schedules": "", "memory": ""}
    if not asked.memory:
        parts["schedules"] = timed(Sizes(), asked.rounds)
        page.draw(Ours(Sizes(), md.topology("cpu"), "1f1b").plan.pipeline)
    parts["memory"] = growing(Sizes(layers=4, embed=64, hidden=256, words=256, seq=16, each=4))
    page.write(parts)
    print(*parts.values(), f"written to {page.PAGE}", sep="\n\n")


def timed(sizes: Sizes, rounds: int) -> str:
    """Step time, compile time and memory of every schedule, of no pipeline, and of the peers' way."""
    topology = calibrate(md.Mesh(pipe=STAGES, data=DATA))
    ours = {NOTHING: Ours(sizes, topology, None)} | {name: Ours(sizes, topology, name) for name in SCHEDULES}
    peer, args = Peer(sizes), arguments(sizes)
    start = time.perf_counter()
    compiled = peer.jitted.lower(*args).compile()
    rows = {PEER: [f"{time.perf_counter() - start:.1f}", temporary(compiled)]}
    for name, each in ours.items():
        size = temporary(each.compiled)
        rows[name] = [f"{each.seconds:.1f}", size]
    steps = {name: stepper(each.sharded, each.args, each.places) for name, each in ours.items()}
    steps[PEER] = stepper(peer.jitted, args, peer.places)
    check(steps)
    seconds = interleave({name: advance for name, (advance, _) in steps.items()}, rounds)
    found = []
    for name, times in seconds.items():
        plan = ours[name].plan if name in ours else None
        pair = str(ratio(times, seconds[NOTHING])), str(ratio(times, seconds[PEER]))
        found.append((name, *predicted(plan), f"{np.median(times):.3f}", *pair, *rows[name]))
    head = ("program", "ticks", "bubble", "stash", "lockstep, s", "asynchronous, s", "measured, s", "/ no pipeline")
    made = table((*head, "/ peers", "compile, s", "temporary"), found)
    return f"{made}\n\n{rounds} interleaved steps, {sizes}."


def predicted(plan: Any) -> tuple[str, ...]:
    """What a plan says of its pipeline."""
    if plan is None or not plan.pipeline:
        return ("", "", "", "" if plan is None else f"{plan.seconds:.3f}", "")
    found, stash = plan.pipeline, " ".join(map(str, plan.pipeline.stash))
    both = f"{found.forecast.lockstep:.3f}", f"{found.forecast.asynchronous:.3f}"
    return str(found.ticks), f"{found.bubble:.1%}", stash, *both


def temporary(compiled: Any) -> str:
    """Bytes of a device that the compiled program needs beside arguments and results."""
    return bytes_text(compiled.memory_analysis().temp_size_in_bytes)


def stepper(run: Callable[..., Any], args: tuple[Any, ...], places: Any) -> tuple[Callable[[], Any], list[float]]:
    """A function that takes one more step of a run of its own, and the losses so far."""
    params, batch = jax.device_put(jax.tree.map(partial(jnp.array, copy=True), args), places)
    state, losses = [params], list[float]()

    def advance() -> Any:
        state[0], loss = run(state[0], batch)
        losses.append(float(loss))
        return state[0]

    return advance, losses


def check(steps: dict[str, tuple[Callable[[], Any], list[float]]]) -> None:
    """Two steps of every program have the same losses."""
    for advance, _ in steps.values():
        advance(), advance()
    first, *others = (losses for _, losses in steps.values())
    assert all(np.allclose(losses, first, rtol=1e-4) for losses in others), steps


def growing(sizes: Sizes) -> str:
    """Temporary bytes as microbatches of one size get more; and all that a device needs, beside the plan's."""
    rows = []
    for m in (8, 16, 32, 64):
        more = Sizes(**{**vars(sizes), "microbatches": m})
        ours = {name: Ours(more, md.topology("cpu"), name) for name in ("1f1b", "gpipe")}
        found = [cell for each in ours.values() for cell in (temporary(each.compiled), both(each))]
        rows.append((m, *found, temporary(Peer(more).jitted.lower(*arguments(more)).compile())))
    head = (f"{name}{more}" for name in ("1f1b", "gpipe") for more in ("", ", all (plan)"))
    return f"{table(('microbatches', *head, PEER), rows)}\n\n{sizes}."


def both(ours: Ours) -> str:
    """Bytes of a device at the fullest point, as compiled and as planned."""
    found = ours.compiled.memory_analysis()
    held = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return f"{bytes_text(found.temp_size_in_bytes + held)} ({bytes_text(ours.plan.memory)})"


if __name__ == "__main__":
    main()
