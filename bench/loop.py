"""What the training loop adds to a step: a run of ``meshdsl train`` beside the bare planned step, in one process.

python -m bench.loop tests/training/tiny.py examples/digits.py --steps 2000

The bare loop calls the planned step on one batch that is in place already, and waits once, at its end. The run reads
and places batches, reads every loss and writes ``metrics.jsonl``, but makes no checkpoint before its end. Both are
timed in turn, in rounds; the least and the median of the ratios are reported. ``--saves`` compares how long a
checkpoint in the background keeps the loop from going on with how long it takes in all.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

import meshdsl as md
from bench.report import machine, table
from meshdsl.api.program import parallelize_program
from meshdsl.cli.programs import load_program
from meshdsl.training.batches import sharded_feed
from meshdsl.training.checkpoint import Checkpoints
from meshdsl.training.loop import Run, train
from meshdsl.training.run import required


def loop_seconds(program: md.Program, mesh: md.Mesh, steps: int, rounds: int) -> tuple[list[float], list[float]]:
    """Returns seconds per step of the bare step and of a run, one of each per round."""
    sharded = parallelize_program(program, mesh)
    batches = required(program.batches)()
    *_, places = sharded.input_shardings(*program.args)[0]
    feed = sharded_feed(batches, program.args[-1], places)
    first = next(feed(0))

    def state() -> tuple[Any, ...]:
        made = sharded.init(required(program.init), program.args[-1])
        return made if isinstance(made, tuple) else (made,)

    def bare() -> None:
        now = state()
        start = time.perf_counter()
        for _ in range(steps):
            *now, loss = sharded(*now, first)
        jax.block_until_ready((now, loss))
        alone.append((time.perf_counter() - start) / steps)

    def run() -> None:
        with TemporaryDirectory() as folder:
            never = Run(steps, Path(folder), save_every=2 * steps, evaluate_every=2 * steps, keep=1)
            train(sharded, state(), feed, never)
            lines = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
            spent = [line["seconds"] for line in lines]
            assert len(spent) == steps
            whole.append(sum(spent[1:]) / (steps - 1))  # the first one opens files

    alone: list[float] = []
    whole: list[float] = []
    for _ in range(rounds + 1):
        bare()
        run()
    return alone[1:], whole[1:]  # without the first round, which compiles


def save_seconds(megabytes: int, devices: int) -> tuple[float, float]:
    """Returns how long a checkpoint keeps the loop from going on, and how long it takes in all."""
    places = NamedSharding(jax.make_mesh((devices,), ("data",)), PartitionSpec("data"))
    make = jax.jit(lambda key: jax.random.normal(key, (2**18,)), out_shardings=places)
    state = {f"w{i}": make(jax.random.key(i)) for i in range(megabytes)}
    with TemporaryDirectory() as folder, Checkpoints(folder) as checkpoints:
        checkpoints.save(1, (state,))  # compiles the digests
        checkpoints.wait()
        jax.block_until_ready(state)
        start = time.perf_counter()
        checkpoints.save(2, (state,))
        blocked = time.perf_counter() - start
        checkpoints.wait()
        return blocked, time.perf_counter() - start


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("programs", nargs="*", default=["tests/training/tiny.py", "examples/digits.py"])
    parser.add_argument("--mesh", type=md.Mesh.parse, default="data=4,model=2")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--saves", type=int, default=256, metavar="MB", help="size of the checkpoint; 0 for none")
    options = parser.parse_args()
    rows = []
    for name in options.programs:
        alone, whole = loop_seconds(load_program(name), options.mesh, options.steps, options.rounds)
        ratios = [b / a for a, b in zip(alone, whole, strict=True)]
        times = (f"{min(each) * 1e6:.0f} ({median(each) * 1e6:.0f})" for each in (alone, whole))
        rows.append((name, *times, f"{min(whole) / min(alone):.2f} ({median(ratios):.2f})"))
    print(table(("program", "bare step, us (median)", "meshdsl train, us (median)", "ratio (median)"), rows))
    if options.saves:
        blocked, whole_save = save_seconds(options.saves, options.mesh.size)
        shares = (f"{blocked * 1e3:.0f}", f"{whole_save * 1e3:.0f}", f"{blocked / whole_save:.3f}")
        print(table(("checkpoint of", "blocks, ms", "in all, ms", "ratio"), [(f"{options.saves} MB", *shares)]))
    print(f"\n{options.rounds} rounds of {options.steps} steps on {options.mesh}; {machine()}")


if __name__ == "__main__":
    main()
