"""The page that says what came of the cases: ``docs/evidence/coverage.md``."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench.report import summarised, table

GATHERED = ("uneven", "fallback")
OUTCOMES = ("pass", "uneven", "fallback", "fail", "skipped")
INTRO = """# Coverage of primitives

JAX tests the export of its primitives with a few thousand harnesses, each a primitive with shapes, dtypes and
parameters. `make coverage` plans and runs each of them on a mesh, with the first splittable dim pinned, and
compares the numbers with those of the unsharded function.

* **pass**: equal numbers, and exactly the planned collectives
* **uneven**: the same, but an operand was gathered because a length does not divide over the devices
* **fallback**: the same, but an operand was gathered because the operation has no rule for shards of it
* **fail**: anything else
* **skipped**: JAX does not run it on CPU, or no dim can be split

A sweep can be limited to some cases of each primitive; the rows count the cases that were run.
XLA's optimizations are off. [Primitives without a rule](primitives.md) are listed with the reason and what they cost.
"""
# Operations on which nothing but a gather is known to be as good and to give the same numbers, and why.
WHOLE = {
    **dict.fromkeys(
        "eig eigh qr svd".split(), "unique up to signs, which shards would choose differently; batches are split"
    ),
    **dict.fromkeys(
        "cholesky lu".split(), "a blocked algorithm sends at least half of that, panel after panel; batches are split"
    ),
    **dict.fromkeys(
        "triangular_solve tridiagonal_solve".split(),
        "each row depends on the previous ones; right-hand sides are split",
    ),
    "approx_top_k": "any of several equal elements may be chosen, and shards could choose others",
    "sort": "not stable: equal keys may be reordered, and shards could reorder them differently",
    "reshape": "no shard of the operand is a shard of the result",
    "concatenate": "no shard of an operand is a shard of the result; other dims are split",
    "slice": "more than half of the dim is sliced off",
    "pad": "the padding is longer than a shard",
    **dict.fromkeys(
        "reduce_window_max select_and_gather_add select_and_scatter_add".split(), "a window is longer than a shard"
    ),
    "gather": "a slice is longer than a shard",
    "dynamic_update_slice": "an update is longer than a shard",
    "squeeze": "a dim of size one",
    "scatter": "updates are split, and the last of two at one position wins",
    **dict.fromkeys("scatter-max scatter-min".split(), "complex numbers, or updates longer than a shard"),
    "scatter-mul": "updates are split, and no collective multiplies",
    **dict.fromkeys("reduce_max reduce_min".split(), "complex numbers, for which no collective computes a maximum"),
    "reduce": "a user-defined reduction, whose initial value need not be neutral",
    **dict.fromkeys("random_gamma rng_bit_generator".split(), "a key of a few integers"),
}


@dataclass(frozen=True)
class Result:
    """The verdict on one case; ``bytes`` are what its fallbacks cost."""

    primitive: str
    name: str
    outcome: str
    reason: str
    bytes: int = 0


def page(results: Mapping[str, Sequence[Result]]) -> str:
    """The page of the results by version of JAX."""
    text = "\n".join([INTRO, *(_section(version, each) for version, each in results.items())])
    return summarised(text, *_short(results))


def _short(results: Mapping[str, Sequence[Result]]) -> Iterator[str]:
    yield "JAX's own test cases of its primitives run sharded, and give the numbers of one device."
    for version, each in results.items():
        count = Counter(result.outcome for result in each)
        gathered = sum(count[outcome] for outcome in GATHERED)
        yield (
            f"{version.partition(':')[0]}: of {len(each):,} cases, {count['pass']:,} pass, "
            f"{gathered} gather an operand, {count['skipped']} are skipped, {count['fail'] or 'none'} fail."
        )


def _section(version: str, results: Sequence[Result]) -> str:
    by_primitive: dict[str, list[Result]] = {}
    for result in results:
        by_primitive.setdefault(result.primitive, []).append(result)
    rows = [_row(name, each) for name, each in sorted(by_primitive.items())]
    header = ("primitive", "cases", *OUTCOMES, "gathered by")
    total = _row(f"**{len(rows)} primitives**", results)[:-1]
    counted = table(header, [*rows, (*total, "")])
    parts = [
        f"## {version}, {len(results)} of them judged\n",
        counted,
        _reasons(results),
        _gathered(results),
        _failures(results),
    ]
    return "\n".join(part for part in parts if part)


def _row(name: str, results: Iterable[Result]) -> tuple[object, ...]:
    found = list(results)
    count = Counter(result.outcome for result in found)
    stuck = Counter(result.reason for result in found if result.outcome in GATHERED)
    return name, len(found), *(count[outcome] or "" for outcome in OUTCOMES), ", ".join(sorted(stuck))


def _reasons(results: Iterable[Result]) -> str:
    """Why cases were skipped; errors of JAX by their type."""
    count = Counter(result.reason.partition(":")[0] for result in results if result.outcome == "skipped")
    return "\nSkipped: " + "; ".join(f"{n} {reason}" for reason, n in count.most_common()) + ".\n" if count else ""


def _gathered(results: Iterable[Result]) -> str:
    """What was gathered, and the bytes that one device sends for it, in all cases together."""
    found = [result for result in results if result.outcome in GATHERED]
    costs = {
        key: [r.bytes for r in found if (r.reason, r.outcome) == key] for key in {(r.reason, r.outcome) for r in found}
    }
    ranked = sorted(costs.items(), key=lambda item: (-sum(item[1]), item[0]))
    rows = [
        (name, kind, len(sent), sum(sent), max(sent), WHOLE.get(name, "") if kind == "fallback" else "")
        for (name, kind), sent in ranked
    ]
    header = ("gathered by", "outcome", "cases", "bytes", "most in a case", "why")
    return "\n".join(["Bytes that one device sends for what is gathered:\n", table(header, rows), ""]) if rows else ""


def _failures(results: Iterable[Result]) -> str:
    failed = [f"* `{result.name}`: {result.reason}" for result in results if result.outcome == "fail"]
    return "\n".join(["Failed:\n", *failed, ""]) if failed else ""
