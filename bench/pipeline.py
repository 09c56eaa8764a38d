"""Pipelines: predicted and measured step time and memory, against no pipeline and against a rolled buffer.

python -m bench.pipeline --rounds 10 writes the tables of docs/evidence/pipelines.md and its picture.

A decoder in plain JAX, its layers in a scan, on 8 virtual CPU devices. ``bench/rolled_buffer.py`` implements pipelining
as MaxText does; its losses are compared with ours before anything is timed.
"""

import argparse
import time
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, NamedTuple

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
    """A planned step: a pipeline under some schedule, or data parallelism alone."""

    def __init__(self, sizes: Sizes, topology: Topology, schedule: str | None) -> None:
        self.sizes, self.args = sizes, arguments(sizes)
        axes = {"data": DATA * STAGES} if schedule is None else {"pipe": STAGES, "data": DATA}
        layouts = {"batch/*": "data=S(0)"} | ({"params/layers/*": "pipe=S(0)"} if schedule else {})
        pipeline = md.Pipeline(sizes.microbatches, *SCHEDULES[schedule]) if schedule else None
        mesh = md.Mesh(topology=topology, **axes)
        self.sharded = md.parallelize(step, mesh, layouts, donate_argnums=0, pipeline=pipeline)
        self.plan = self.sharded.plan(*self.args)
        self.shardings = self.sharded.input_shardings(*self.args)[0]

    @cached_property
    def compiled(self) -> "Compiled":
        """The compiled step."""
        start = time.perf_counter()
        executable = self.sharded.lower(*self.args).compile()
        return Compiled(executable, time.perf_counter() - start)


class Compiled(NamedTuple):
    """An executable, and the seconds that XLA took to compile it."""

    executable: Any
    seconds: float

    @property
    def temporary(self) -> str:
        """Temporary bytes per device, without arguments and results."""
        return bytes_text(self.executable.memory_analysis().temp_size_in_bytes)


def main() -> None:
    """Measures, and writes the tables and the picture of the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--memory", action="store_true", help="only memory against the number of microbatches")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    parts = {"memory": ""} if options.memory else {"machine": page.machine_line(), "schedules": "", "memory": ""}
    if not options.memory:
        parts["schedules"] = timed(Sizes(), options.rounds)
        page.draw(Ours(Sizes(), md.topology("cpu"), "1f1b").plan.pipeline)
    parts["memory"] = growing(Sizes(layers=4, embed=64, hidden=256, words=256, seq=16, each=4))
    page.write(parts)
    print(*parts.values(), f"written to {page.PAGE}", sep="\n\n")


def timed(sizes: Sizes, rounds: int) -> str:
    """Returns the table of step time, compile time and memory: every schedule, no pipeline, and the rolled buffer."""
    topology = calibrate(md.Mesh(pipe=STAGES, data=DATA))
    ours = {NOTHING: Ours(sizes, topology, None)} | {name: Ours(sizes, topology, name) for name in SCHEDULES}
    peer, args = Peer(sizes), arguments(sizes)
    start = time.perf_counter()
    executable = peer.jitted.lower(*args).compile()
    compiled = {PEER: Compiled(executable, time.perf_counter() - start)}
    compiled |= {name: each.compiled for name, each in ours.items()}
    steps = {name: stepper(each.sharded, each.args, each.shardings) for name, each in ours.items()}
    steps[PEER] = stepper(peer.jitted, args, peer.shardings)
    check(steps)
    seconds = interleave({name: advance for name, (advance, _) in steps.items()}, rounds)
    rows = []
    for name, times in seconds.items():
        plan = ours[name].plan if name in ours else None
        ratios = str(ratio(times, seconds[NOTHING])), str(ratio(times, seconds[PEER]))
        built = f"{compiled[name].seconds:.1f}", compiled[name].temporary
        rows.append((name, *predicted(plan), f"{np.median(times):.3f}", *ratios, *built))
    head = ("program", "ticks", "bubble", "stash", "lockstep, s", "asynchronous, s", "measured, s", "/ no pipeline")
    text = table((*head, "/ peers", "compile, s", "temporary"), rows)
    return f"{text}\n\n{rounds} interleaved steps, {sizes}."


def predicted(plan: Any) -> tuple[str, ...]:
    """Returns the plan's ticks, bubble, stash, and its lockstep and asynchronous seconds."""
    if plan is None or not plan.pipeline:
        return ("", "", "", "" if plan is None else f"{plan.seconds:.3f}", "")
    pipeline, stash = plan.pipeline, " ".join(map(str, plan.pipeline.stash))
    seconds = f"{pipeline.forecast.lockstep:.3f}", f"{pipeline.forecast.asynchronous:.3f}"
    return str(pipeline.ticks), f"{pipeline.bubble:.1%}", stash, *seconds


def stepper(run: Callable[..., Any], args: tuple[Any, ...], shardings: Any) -> tuple[Callable[[], Any], list[float]]:
    """Returns a function that advances its own copy of the state by one step, and the list of losses so far."""
    params, batch = jax.device_put(jax.tree.map(partial(jnp.array, copy=True), args), shardings)
    state, losses = [params], list[float]()

    def advance() -> Any:
        state[0], loss = run(state[0], batch)
        losses.append(float(loss))
        return state[0]

    return advance, losses


def check(steps: dict[str, tuple[Callable[[], Any], list[float]]]) -> None:
    """Asserts that all programs have the same losses over two steps."""
    for advance, _ in steps.values():
        advance(), advance()
    first, *others = (losses for _, losses in steps.values())
    assert all(np.allclose(losses, first, rtol=1e-4) for losses in others), steps


def growing(sizes: Sizes) -> str:
    """Returns the table of temporary and of peak bytes per device against the number of microbatches of one size."""
    rows = []
    for m in (8, 16, 32, 64):
        more = Sizes(**{**vars(sizes), "microbatches": m})
        ours = {name: Ours(more, md.topology("cpu"), name) for name in ("1f1b", "gpipe")}
        cells = [cell for each in ours.values() for cell in (each.compiled.temporary, peak_bytes(each))]
        peer = Compiled(Peer(more).jitted.lower(*arguments(more)).compile(), 0.0)
        rows.append((m, *cells, peer.temporary))
    head = (f"{name}{more}" for name in ("1f1b", "gpipe") for more in ("", ", all (plan)"))
    return f"{table(('microbatches', *head, PEER), rows)}\n\n{sizes}."


def peak_bytes(ours: Ours) -> str:
    """Peak bytes per device, as compiled and (in parentheses) as planned."""
    memory = ours.compiled.executable.memory_analysis()
    arguments = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return f"{bytes_text(memory.temp_size_in_bytes + arguments)} ({bytes_text(ours.plan.memory)})"


if __name__ == "__main__":
    main()
