"""The cases as programs that jax divides itself: does a right one get called wrong?

Every case is compiled in three ways, and ``md.inspect(...).check()`` is asked about it:

* jit        ``jax.jit``, its arguments split over a mesh
* explicit   the same with axes of ``AxisType.Explicit``, one dim alone if jax refuses all
* shard_map  every device runs the case on its blocks, or on whole arguments if jax refuses blocks

A case that is called wrong is run on the devices at hand: where the numbers are always those of one device, it is a
false alarm.

JAX_NUM_CPU_DEVICES=8 python -m tests.coverage.sums --every 4 --primitive 'scatter*'
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import groupby
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import meshdsl as md
from bench.report import versions
from tests.coverage.cases import Case, cases
from tests.fuzz.alarms import is_wrong
from tests.fuzz.compiled import Worker
from tests.quick_compiles import compile_quickly

MESHES = ({"data": 4, "model": 2}, {"data": 3, "model": 2}, {"data": 5}, {"data": 7})
WAYS = ("jit", "explicit", "shard_map")
LIMIT = 1e8  # elements that simulated devices compute
BATCH = 20  # cases of one request to a process
RUNS = 20  # requests to one process
ROUNDING = {1: 2e-1, 2: 2e-2}  # of floats of so many bytes
Found = list[tuple[str, str]]  # outcomes, and what is to be said of them


def judge(case: Case) -> Found:
    """Returns an outcome for every way in which a case is compiled."""
    try:
        args = case.args()
        jax.jit(case.step).lower(args)
    except Exception as error:
        return [("no program: jax refuses the case itself", _line(error))]
    sizes, specs = _split(args)
    if not any(axis for spec in specs for axis in spec):
        return [("no program: nothing to split", "")]
    found = []
    for way in WAYS:
        outcome, said = _judged(way, case, args, sizes, specs)
        found.append((f"{way}: {outcome}", said))
    return found


def _split(args: Sequence[Any]) -> tuple[dict[str, int], list[PartitionSpec]]:
    """The first mesh that divides a dim, and specs over it: the first dims that its axes divide."""
    for sizes in MESHES:
        specs = [_spec(x.shape, sizes) for x in jax.tree.leaves(args)]
        if any(axis for spec in specs for axis in spec):
            return sizes, specs
    return {}, [PartitionSpec() for _ in jax.tree.leaves(args)]


def _spec(shape: Sequence[int], sizes: dict[str, int]) -> PartitionSpec:
    left, entries = dict(sizes), list[str | None]()
    for n in shape:
        axis = next((axis for axis, size in left.items() if n and n % size == 0), None)
        entries.append(axis)
        if axis is not None:
            del left[axis]
    return PartitionSpec(*entries)


@cache
def _mesh(sizes: tuple[tuple[str, int], ...], kind: AxisType) -> Any:
    names, shape = zip(*sizes, strict=True)
    count = int(np.prod(shape))
    return jax.make_mesh(shape, names, (kind,) * len(names), devices=jax.devices()[:count])


def _judged(
    way: str, case: Case, args: list[Any], sizes: dict[str, int], specs: list[PartitionSpec]
) -> tuple[str, str]:
    mesh = _mesh(tuple(sizes.items()), AxisType.Explicit if way == "explicit" else AxisType.Auto)
    tree, leaves = jax.tree.structure(args), jax.tree.leaves(args)

    def step(*flat: Any) -> Any:
        return case.step(jax.tree.unflatten(tree, flat))

    with jax.set_mesh(mesh):
        refused = ""
        for program, whole, shardings in _programs(way, step, leaves, mesh, specs):
            shapes = [_shape(x, at) for x, at in zip(leaves, shardings, strict=True)]
            try:
                program.lower(*shapes)
                break
            except Exception as error:
                refused = refused or _line(error)
        else:
            return "refused by jax", refused
        try:
            check = md.inspect(program, *shapes).check(limit=LIMIT, raises=False)
        except md.CheckError as error:
            return "not followed", _line(error)
        except jax.errors.JaxRuntimeError as error:
            return "refused by jax", _line(error)
        except Exception as error:
            return "ERROR", _line(error)
    if check.equal:
        open_ = sorted({f"{x.operation}: {x.reason[:60]}" for x in check.unfollowed})
        outcome = "agree" if len(check.agreeing) == check.results else "not followed"
        return outcome, "; ".join(open_)
    bytes_ = min((x.dtype.itemsize for x in leaves if jax.numpy.issubdtype(x.dtype, jax.numpy.floating)), default=4)
    rng = np.random.default_rng(0)
    real = is_wrong(program, whole, leaves, shardings, rng, ROUNDING.get(bytes_, 1e-4))
    return "wrong on devices too" if real else "FALSE ALARM", str(check)


def _shape(x: Any, at: NamedSharding) -> jax.ShapeDtypeStruct:
    aval = jax.typeof(x)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=at, weak_type=aval.weak_type)


def _programs(
    way: str, step: Callable[..., Any], leaves: list[Any], mesh: Any, specs: list[PartitionSpec]
) -> list[tuple[Any, Callable[..., Any], list[NamedSharding]]]:
    """The jitted programs to try, what they compute, on one device, and the shardings of their arguments."""
    if way == "shard_map":
        alone = [PartitionSpec()] * len(specs)
        return [_mapped(step, mesh, each, vma) for each in (specs, alone) for vma in (True, False)]
    tried = [specs, *_single(specs)] if way == "explicit" else [specs]
    return [(jax.jit(step), jax.jit(step), [NamedSharding(mesh, spec) for spec in each]) for each in tried]


def _single(specs: list[PartitionSpec]) -> Iterator[list[PartitionSpec]]:
    """Specs that split one dim of these alone, the last dims first."""
    for i, spec in enumerate(specs):
        for d in reversed(range(len(spec))):
            if spec[d] is not None:
                one = PartitionSpec(*(None,) * d, spec[d])
                yield [one if i == j else PartitionSpec() for j in range(len(specs))]


def _mapped(
    step: Callable[..., Any], mesh: Any, specs: list[PartitionSpec], vma: bool
) -> tuple[Any, Callable[..., Any], list[NamedSharding]]:
    """The step on every device's blocks, its results one behind the other; and the same, device by device, on one."""
    shardings = [NamedSharding(mesh, spec) for spec in specs]

    def body(*blocks: Any) -> Any:
        return jax.tree.map(lambda x: jax.numpy.expand_dims(x, 0), step(*blocks))

    def whole(*flat: Any) -> Any:
        cuts = [at.devices_indices_map(np.shape(x)) for x, at in zip(flat, shardings, strict=True)]
        run = jax.jit(step)
        each = [run(*(x[cut[d]] for x, cut in zip(flat, cuts, strict=True))) for d in mesh.devices.flat]
        return jax.tree.map(lambda *parts: np.stack([np.asarray(x) for x in parts]), *each)

    stacked = PartitionSpec(mesh.axis_names)
    program = jax.shard_map(body, mesh=mesh, in_specs=tuple(specs), out_specs=stacked, check_vma=vma)
    return jax.jit(program), whole, shardings


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]


def chosen(glob: str, limit: int | None, every: int) -> list[Case]:
    """Returns one case in ``every`` of each primitive that matches, at least one."""
    grouped = groupby(cases(glob, limit), lambda case: case.primitive)
    return [case for _, group in grouped for case in list(group)[::every]]


def judged(glob: str, limit: int | None, every: int, start: int, end: int) -> list[tuple[str, Found]]:
    """Returns the outcomes of some of the chosen cases."""
    found = [(case.name, judge(case)) for case in chosen(glob, limit, every)[start:end]]
    jax.clear_caches()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--primitive", default="*", metavar="GLOB", help="only these primitives")
    parser.add_argument("--limit", type=int, help="at most so many cases of each primitive")
    parser.add_argument("--every", type=int, default=1, help="one case in so many of each primitive")
    parser.add_argument("--start", type=int, default=0, help="leave out so many cases at the start")
    parser.add_argument("--part", default="1/1", help="2/3: the second of three equal parts")
    asked = parser.parse_args()
    compile_quickly()
    part, parts = map(int, asked.part.split("/"))
    counts, reasons, start = Counter[str](), Counter[str](), time.time()
    count, worker, answered = len(chosen(asked.primitive, asked.limit, asked.every)), Worker(judged), 0
    todo = [(i, min(i + BATCH, count)) for i in range(asked.start, count, BATCH)][part - 1 :: parts]
    while todo:
        at = todo.pop(0)
        try:
            found = worker.run(asked.primitive, asked.limit, asked.every, *at)
            lost = False
        except (EOFError, OSError, TimeoutError):
            lost = True
            if at[1] - at[0] > 1:
                todo[:0] = [(i, i + 1) for i in range(*at)]
                found = []
            else:
                name = chosen(asked.primitive, asked.limit, asked.every)[at[0]].name
                found = [(name, [("no program: crash of the compiler, or no answer", "")])]
        for name, outcomes in found:
            counts["cases"] += 1
            for outcome, said in outcomes:
                counts[outcome] += 1
                if outcome.endswith(("FALSE ALARM", "too", "ERROR", "answer")):
                    print(f"{name}, {outcome}: {said}\n", flush=True)
                elif said:
                    reasons[f"{outcome}: {said.split(':')[0] if 'jax' in outcome else said[:100]}"] += 1
        print(f"{counts['cases']} of {count} cases in {time.time() - start:.0f} s", flush=True)
        answered += 1
        if lost or answered % RUNS == 0:
            worker.end()
            worker = Worker(judged)
    worker.end()
    print(f"{versions()}: {count} of {len(cases())} cases")
    print("\n".join(f"{n:6,}  {what}" for what, n in sorted(counts.items())))
    print("\n".join(f"{n:6,}  {what}" for what, n in reasons.most_common()))
    sys.exit(any(what.endswith(("FALSE ALARM", "ERROR")) for what in counts))


if __name__ == "__main__":
    main()
