"""What the training loop adds to a step: a run of ``meshdsl train`` beside the bare planned step, in one process.

python -m bench.loop tests/training/tiny.py --steps 300 --sink 5 10

The bare loop calls the planned step on one batch that is in place already, and waits once, at its end. The fed loop
does the same with every batch of the program, which the step places. The run reads and places batches, reads every loss
and writes ``metrics.jsonl``, but makes no checkpoint before its end; ``--sink`` adds runs of several steps in one
dispatch. All are timed in turn, in rounds; the ratios are of the least times, and medians of those of each round.
``--saves`` compares how long a checkpoint in the background keeps the loop from going on with how long it takes in all,
and says by how much the next update of the state, which donates it, is later.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from itertools import islice, repeat
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

import meshdsl as md
from bench.report import machine, table
from meshdsl.api.program import parallelize_program
from meshdsl.api.sink import SunkStep
from meshdsl.cli.programs import load_program
from meshdsl.training.batches import host_feed, sharded_feed
from meshdsl.training.loop import Run, train
from meshdsl.training.observing.metrics import read_metrics
from meshdsl.training.run import required
from meshdsl.training.saving.checkpoint import Checkpoints
from meshdsl.training.sink import Sink

BARE, FED = 0, -1  # in place of the number of steps in one dispatch


def loop_seconds(
    program: md.Program, mesh: md.Mesh, steps: int, rounds: int, sinks: Sequence[int]
) -> dict[int, list[float]]:
    """Returns seconds per step of each round: of ``BARE`` and ``FED`` loops, of runs by the steps in one dispatch."""
    sharded = parallelize_program(program, mesh)
    batches = required(program.batches)()
    *_, places = sharded.input_shardings(*program.args)[0]
    feed = sharded_feed(batches, program.args[-1], places)
    first = next(feed(0))
    stages, arrays = sharded.stages(*program.args), len(jax.tree.leaves(program.args[-1]))
    sunk = {count: SunkStep(stages, count, arrays) for count in sinks if count > 1}

    def state() -> tuple[Any, ...]:
        made = sharded.init(required(program.init), program.args[-1])
        return made if isinstance(made, tuple) else (made,)

    def loop(inputs: Iterator[Any]) -> float:
        now = state()
        start = time.perf_counter()
        for batch in islice(inputs, steps):
            *now, loss = sharded(*now, batch)
        jax.block_until_ready((now, loss))
        return (time.perf_counter() - start) / steps

    def run(count: int) -> float:
        step = sunk.get(count)
        sink = step and Sink(count, step, step.compile, feed.stacked)
        with TemporaryDirectory() as folder:
            never = Run(steps, Path(folder), save_every=2 * steps * count, evaluate_every=2 * steps * count, keep=1)
            train(sharded, state(), feed, never, sink=sink)
            spent = [line["seconds"] for line in read_metrics(Path(folder) / "metrics.jsonl")]
            assert len(spent) == steps
            return sum(spent[count:]) / (steps - count)  # the first dispatch opens files

    loops = {BARE: lambda: repeat(first), FED: lambda: host_feed(batches)(0)}
    found: dict[int, list[float]] = {count: [] for count in (*loops, 1, *sunk)}
    for _ in range(rounds + 1):
        for count, times in found.items():
            times.append(loop(loops[count]()) if count in loops else run(count))
    return {count: times[1:] for count, times in found.items()}  # without the first round, which compiles


def save_seconds(megabytes: int, each: int, devices: int, rounds: int) -> tuple[float, float, float]:
    """Returns how long a checkpoint of arrays keeps the loop from going on, and takes in all, and delays what follows.

    All are medians. What follows is an update of the arrays that donates them.

    Args:
      megabytes: of the checkpoint.
      each: megabytes of an array.
    """
    places = NamedSharding(jax.make_mesh((devices,), ("data",)), PartitionSpec("data"))
    make = jax.jit(lambda key: jax.random.normal(key, (each * 2**18,)), out_shardings=places)
    state = {f"w{i}": make(jax.random.key(i)) for i in range(megabytes // each)}
    update = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    times: list[tuple[float, float, float]] = []
    with TemporaryDirectory() as folder, Checkpoints(folder) as checkpoints:
        for step in range(0, 2 * rounds + 2, 2):
            jax.block_until_ready(state)
            start = time.perf_counter()
            checkpoints.save(step, (state,))
            blocked = time.perf_counter() - start
            checkpoints.wait()
            whole = time.perf_counter() - start
            start = time.perf_counter()
            state = jax.block_until_ready(update(state))
            alone = time.perf_counter() - start
            checkpoints.save(step + 1, (state,))
            start = time.perf_counter()
            state = jax.block_until_ready(update(state))
            times.append((blocked, whole, time.perf_counter() - start - alone))
            checkpoints.wait()
    blocked, whole, later = (median(column) for column in zip(*times[1:], strict=True))  # the first round compiles
    return blocked, whole, later


def _ratio(times: Sequence[float], others: Sequence[float]) -> float:
    return median(a / b for a, b in zip(times, others, strict=True))


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("programs", nargs="*", default=["tests/training/tiny.py", "examples/digits.py"])
    parser.add_argument("--mesh", type=md.Mesh.parse, default="data=4,model=2")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sink", type=int, nargs="*", default=[], help="also several steps in one dispatch")
    parser.add_argument("--saves", type=int, default=256, metavar="MB", help="size of the checkpoint; 0 for none")
    options = parser.parse_args()
    rows = []
    for name in options.programs:
        found = loop_seconds(load_program(name), options.mesh, options.steps, options.rounds, options.sink)
        alone = found.pop(BARE)
        fed = found.pop(FED)
        for count, whole in found.items():
            times = (f"{min(each) * 1e6:.0f} ({median(each) * 1e6:.0f})" for each in (alone, fed, whole))
            ratios = (f"{min(whole) / min(each):.2f} ({_ratio(whole, each):.2f})" for each in (alone, fed))
            rows.append((name, count, *times, *ratios))
    header = (
        "program",
        "steps in one dispatch",
        "bare step, us (median)",
        "fed step, us (median)",
        "meshdsl train, us (median)",
        "ratio to bare (median)",
        "ratio to fed (median)",
    )
    print(table(header, rows))
    if options.saves:
        rows = []
        for each in (1, 16):
            blocked, in_all, later = save_seconds(options.saves, each, options.mesh.size, options.rounds)
            shares = (f"{blocked * 1e3:.0f}", f"{in_all * 1e3:.0f}", f"{blocked / in_all:.3f}", f"{later * 1e3:.0f}")
            rows.append((f"{options.saves // each} arrays of {each} MB", *shares))
        print(table(("checkpoint of", "blocks, ms", "in all, ms", "ratio", "next update later by, ms"), rows))
    print(f"\n{options.rounds} rounds of {options.steps} steps on {options.mesh}; {machine()}")


if __name__ == "__main__":
    main()
