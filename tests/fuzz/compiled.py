"""Random programs partitioned by XLA, on simulated devices, and faulty variants of them, which have to be found.

A program that is called wrong is run on the devices at hand, with random arguments: where its numbers are always
those of one device, it is a false alarm. Programs are those of ``tests.fuzz``, under plain ``jax.jit`` with random
shardings of their arguments.

JAX_NUM_CPU_DEVICES=8 python -m tests.fuzz.compiled --cases 1000 --mutants 2000 --seed 7
"""

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

import hypothesis
import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding

import meshdsl as md
from meshdsl.layouts.layout import Layout
from meshdsl.lowering.hlo.parse import parse_module
from meshdsl.lowering.partitioner import CompiledModules, compiled_modules
from meshdsl.lowering.simulation.check import ProgramCheck, check_program
from meshdsl.lowering.simulation.comparison import ProgramPair
from meshdsl.lowering.simulation.interpreter import TooLarge, Unfollowed, Value
from meshdsl.lowering.simulation.numbers import PrimeField, Reals
from meshdsl.lowering.simulation.operation import Operation
from meshdsl.shardings import partition_spec
from tests.fuzz.alarms import is_wrong
from tests.fuzz.generator import Batch, Case, batches
from tests.fuzz.run import SETTINGS
from tests.fuzz.worker import STILL
from tests.lowering.simulation.mutants import Mutant, mutants
from tests.quick_compiles import compile_quickly

CASES, LIMIT = 6, 1e8
SHORT = ("bfloat16", "float16", "float8")
PER_PROGRAM = 8  # mutants of one program, drawn among all
INPUTS = 24  # of a mutant that is not found
EQUIVALENT = ("that compute the same value", "whose other value changes no result")
MISSED = "missed"
RUNS = 20  # of one process


class Sweep:
    """Counts of programs and mutants, and texts of what went wrong.

    Args:
      wanted: mutants to be made in all. seed: of the draws among them.
    """

    def __init__(self, wanted: int, seed: int) -> None:
        self.wanted, self.counts = wanted, Counter[str]()
        self.made, self.found = Counter[str](), Counter[str]()
        self._rng = np.random.default_rng(seed)

    def case(self, case: Case, mesh: md.Mesh) -> None:
        """Checks a program, and its mutants if it is right."""
        jitted, args = _jitted(case, mesh)
        try:
            modules = compiled_modules(jitted.lower(*args))
        except (ValueError, TypeError, jax.errors.JaxRuntimeError, md.MeshDSLError) as error:
            self.counts["not compiled"] += 1
            print(f"not compiled: {str(error).splitlines()[0]}", flush=True)
            return
        self.counts["programs"] += 1
        paths = [str(i) for i in range(len(jax.tree.leaves(jax.eval_shape(case.step, *args))))]
        try:
            check = check_program("step", modules, mesh, paths, inputs=2, limit=LIMIT)
        except md.CheckError as error:
            self.counts["too large or unreadable"] += 1
            print(str(error).splitlines()[0], flush=True)
            return
        self._judge(check, case, jitted, args)
        if not check.faults and not check.unfollowed and self.made.total() < self.wanted:
            self._mutate(modules, mesh.size, case)

    def _judge(self, check: ProgramCheck, case: Case, jitted: Any, args: list[Any]) -> None:
        followed = {path for each in check.unfollowed for path in each.results}
        self.counts["results"] += check.results
        self.counts["results that agree"] += len(check.agreeing)
        self.counts["results not followed"] += len(followed)
        for each in check.unfollowed:
            self.counts[f"not followed: {each.operation}: {each.reason[:60]} ({each.stage})"] += 1
        if check.equal:
            return
        real = self._is_wrong(case, jitted, args)
        self.counts["wrong programs" if real else "false alarms"] += 1
        print(f"{'wrong' if real else 'FALSE ALARM'}: {check}\n{case}\n", flush=True)

    def _is_wrong(self, case: Case, jitted: Any, args: list[Any]) -> bool:
        short = any(dtype in case.source for dtype in SHORT) or any(i.value.dtype in SHORT for i in case.inputs)
        shardings = [x.sharding for x in args]
        return is_wrong(jitted, jax.jit(case.step), case.args(), shardings, self._rng, 1e-2 if short else 1e-4)

    def _mutate(self, modules: CompiledModules, devices: int, case: Case) -> None:
        drawn = list(mutants(modules.partitioned, devices, self._rng))
        right = ProgramPair(parse_module(modules.whole), parse_module(modules.partitioned), devices)
        for i in self._rng.permutation(len(drawn))[:PER_PROGRAM]:
            mutant = drawn[i]
            try:
                verdict = _verdict(right, mutant)
            except TooLarge:
                print(f"too large: {mutant.line}", flush=True)
                continue
            self.made[mutant.kind] += 1
            if verdict:
                print(f"{verdict}, {mutant.kind}: {mutant.line[:200]}", flush=True)
            if verdict == MISSED:
                print(f"{case}\n", flush=True)
            self.found[f"{mutant.kind}{verdict and ': '}{verdict}"] += 1

    def __str__(self) -> str:
        rows = [f"{count:8,}  {name}" for name, count in sorted(self.counts.items())]
        kinds = [self._rates(kind, [kind]) for kind in sorted(self.made)]
        return "\n".join([*rows, *kinds, self._rates("all", sorted(self.made))])

    def _rates(self, name: str, kinds: list[str]) -> str:
        """What became of the mutants of some kinds."""
        made, found = (sum(counts[kind] for kind in kinds) for counts in (self.made, self.found))
        same = {how: sum(self.found[f"{kind}: {how}"] for kind in kinds) for how in EQUIVALENT}
        faults = made - sum(same.values())
        rate = f"{found / faults:.1%}" if faults else "-"
        others = ", ".join(f"{count:,} {how}" for how, count in same.items() if count)
        return f"{found:8,} of {faults:,} faults found ({rate}): {name}; besides {others or 'none'}"


def _jitted(case: Case, mesh: md.Mesh) -> tuple[Any, list[Any]]:
    """The step under ``jax.jit``, and its arguments laid out as the case's pins say, partial sums aside."""
    devices = jax.make_mesh(
        mesh.sizes, mesh.names, (AxisType.Auto,) * len(mesh.sizes), devices=jax.devices()[: mesh.size]
    )
    placed = []
    for given, array in zip(case.inputs, case.args(), strict=True):
        layout = Layout.of(case.pins.get(given.value.name, " ".join(f"{name}=B" for name in mesh.names)))
        layout = Layout(**{name: p for name, p in layout.placements if name not in layout.partial()})
        shards = layout.shards(array.ndim, dict(mesh))
        divides = all(n % count == 0 for n, count in zip(array.shape, shards, strict=True))
        spec = partition_spec(layout if divides else Layout(), array.ndim)
        placed.append(jax.device_put(array, NamedSharding(devices, spec)))
    return jax.jit(case.step), placed


def _verdict(right: ProgramPair, mutant: Mutant) -> str:
    """Empty if a mutant is found, as ``check_program`` would; else whether it is a fault at all.

    It is none if the changed instruction has the same value on every device whenever it runs, or if no result changes
    on any device: for many more inputs, among them integers that are all indices, and truth values.
    """
    pair = replace(right, partitioned=parse_module(mutant.text))
    if any(x.differs for numbers in (PrimeField(), Reals()) for seed in range(2)
           for x in pair.compare(numbers, seed, LIMIT)):  # fmt: skip
        return ""
    same = True
    for seed in range(INPUTS):
        numbers, below = (PrimeField(), Reals())[seed % 2], (None, 2, 4)[seed % 3]
        values = [_Values(mutant.name), _Values(mutant.name)]
        results = [each.compare(numbers, 100 + seed, LIMIT, local=seen, below=below)
                   for each, seen in zip((right, pair), values, strict=True)]  # fmt: skip
        if any(a.differs != b.differs for a, b in zip(*results, strict=True)):
            return MISSED
        same = same and values[0].digests == values[1].digests
    return EQUIVALENT[0] if same else EQUIVALENT[1]


class _Values:
    """The values of an instruction, each time it runs; an observer of simulated devices."""

    def __init__(self, name: str) -> None:
        self.digests = list[bytes]()
        self._name = name

    def __call__(self, computation: str, operation: Operation, value: Value) -> None:
        if operation.name == self._name:
            for x in value if isinstance(value, tuple) else (value,):
                devices = [b""] if isinstance(x, Unfollowed) else [np.ascontiguousarray(own).tobytes() for own in x]
                self.digests.append(sha256(b"".join(devices[: None if len(set(devices)) > 1 else 1])).digest())


def _run(seed: int, wanted: int) -> Sweep:
    """One seed's programs."""
    sweep = Sweep(wanted, seed)

    @hypothesis.seed(seed)
    @SETTINGS
    @hypothesis.given(batches(CASES))
    def each(batch: Batch) -> None:
        for case in batch.cases:
            sweep.case(case, batch.mesh)

    each()
    jax.clear_caches()
    return sweep


def _counted(seed: int, wanted: int) -> tuple[Counter[str], ...]:
    sweep = _run(seed, wanted)
    return sweep.counts, sweep.made, sweep.found


def _serve(pipe: Connection, answer: Callable[..., Any]) -> None:
    """Answers what comes through a pipe, in a process of its own."""
    while True:
        pipe.send(answer(*pipe.recv()))


class Worker:
    """A process for several runs; another one after a run that ends it or stands still.

    Args:
      answer: a function of a module, which is called there.
    """

    def __init__(self, answer: Callable[..., Any]) -> None:
        spawned = multiprocessing.get_context("spawn")
        self._here, there = spawned.Pipe()
        self._process = spawned.Process(target=_serve, args=(there, answer), daemon=True)
        self._process.start()
        there.close()

    def run(self, *args: Any) -> Any:
        """Returns the answer.

        Raises:
          EOFError, TimeoutError: it has not come back.
        """
        self._here.send(args)
        if not self._here.poll(STILL):
            raise TimeoutError
        return self._here.recv()

    def end(self) -> None:
        """Ends the process, whatever it does."""
        self._process.kill()
        self._process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--mutants", type=int, default=2000, help="0 for none")
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    asked = parser.parse_args()
    compile_quickly()
    total, start, worker = Sweep(asked.mutants, asked.seed), time.time(), Worker(_counted)
    for run in count():
        try:
            found = worker.run(asked.seed + run, asked.mutants - total.made.total())
            for mine, its in zip((total.counts, total.made, total.found), found, strict=True):
                mine.update(its)
            lost = ""
        except TimeoutError:
            lost = "runs that stood still"
        except (EOFError, OSError):
            lost = "runs that a crash of the compiler ended"
        if lost:
            total.counts[lost] += 1
        done = total.counts["programs"]
        print(f"seed {asked.seed + run}, {time.time() - start:.0f} s: {done} programs", flush=True)
        if done >= asked.cases:
            break
        if lost or run % RUNS == RUNS - 1:
            worker.end()
            worker = Worker(_counted)
    worker.end()
    print(total)
    sys.exit(total.counts["false alarms"] > 0)


if __name__ == "__main__":
    main()
