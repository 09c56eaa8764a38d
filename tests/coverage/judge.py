"""The judgement of a case: does it run in blocks, and are its numbers right?

The first dim of the first array that can be split is pinned to axis ``x``; everything else is
the planner's choice, on links so slow that it gathers only what it must. Two devices split the
dim and two more stand on an axis ``y``; a dim of odd length is split by 3, 5 or 7 devices alone.

* pass      the numbers equal the unsharded ones, and the compiled collectives the planned ones
* fallback  likewise, but an operation was handed a split or partial operand, and its rule has no
            row for it, so it was gathered and runs the same everywhere
* uneven    likewise, but the rule has a row, and a length does not divide over the devices
* fail      other numbers, other collectives, or an error
* skipped   JAX does not run the case, or there is no dim to split
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec

import meshdsl as md
from bench.fallbacks import fallbacks
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.placement import Split
from meshdsl.layouts.topology import Link, Topology
from meshdsl.lowering.numerics import check_numbers
from meshdsl.trace import trace
from tests.coverage.cases import Case

SLOW = Topology("slow links", 1e10, 1e10, 4e9, 4e9, 0.0, (Link(latency=0.0, bandwidth=1e6),))
MESHES = {k: md.Mesh(x=k, y=2 if k == 2 else 1, topology=SLOW) for k in (2, 3, 5, 7)}
NO_EMPTY = jax.__version_info__ < (0, 11)  # there JAX gives empty arrays that are split a wrong shape


@dataclass(frozen=True)
class Verdict:
    """What became of a case, and why.

    Args:
      bytes: what one device sends to gather operands for want of a rule.
    """

    outcome: str
    reason: str = ""
    bytes: int = 0


def judge(case: Case) -> Verdict:
    """Plan and run a case, and compare it with the unsharded function."""
    if not case.supported:
        return Verdict("skipped", "JAX does not support it on CPU")
    try:
        args = case.args()
        expected = jax.jit(case.step)(args)
    except Exception as error:
        return Verdict("skipped", f"JAX does not run it: {_line(error)}")
    pin = next(_pins(args), None)
    if pin is None:
        return Verdict("skipped", "no dim to split")
    if NO_EMPTY and any(x.size == 0 for x in jax.tree.leaves(expected)):
        return Verdict("skipped", "this version of JAX cannot split empty arrays")
    try:
        return _run(case, args, expected, *pin)
    except Exception as error:
        return (
            Verdict("fail", _line(error))
            if _maps(case, args)
            else Verdict("skipped", "JAX does not run it in shard_map")
        )


def _maps(case: Case, args: list[Any]) -> bool:
    """Whether JAX runs the case at all where every device runs the same program."""
    alone = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1], axis_types=(AxisType.Auto,))
    whole = jax.shard_map(case.step, mesh=alone, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    try:
        jax.jit(whole)(args)
    except Exception:
        return False
    return True


def _pins(args: list[Any]) -> Iterator[tuple[md.Mesh, str, Layout]]:
    """Mesh, path and layout of every dim that can be split, those that two devices can split first."""
    for k, mesh in MESHES.items():
        for path, x in jax.tree_util.tree_leaves_with_path({"args": args}):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            yield from ((mesh, name, Layout(x=Split(d))) for d, n in enumerate(x.shape) if n and n % k == 0)


def _run(case: Case, args: Any, expected: Any, mesh: md.Mesh, path: str, layout: Layout) -> Verdict:
    sharded = md.parallelize(case.step, mesh, layouts={path: layout})
    got, paths = jax.tree.leaves(sharded(args)), [array.path for array in sharded.plan(args).outputs]
    check_numbers(jax.tree.leaves(expected), got, paths)
    sharded.verify(args)
    program = trace(case.step, (args,))
    stuck = list(fallbacks(program, sharded.plan(args).solution))
    if not stuck:
        return Verdict("pass")
    names, sent = ", ".join(sorted({each.name for each in stuck})), sum(each.bytes for each in stuck)
    return Verdict("uneven" if all(each.uneven for each in stuck) else "fallback", names, sent)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
