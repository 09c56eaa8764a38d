"""The page that says what came of the cases: ``docs/coverage.md``."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bench.report import table

OUTCOMES = ("pass", "fallback", "fail", "skipped")
INTRO = """# Coverage of primitives

JAX tests the export of its primitives with a few thousand harnesses: a primitive, shapes, dtypes and
parameters each. `make coverage` plans and runs every one of them on a mesh of devices, with the first
dim that can be split pinned, and compares the numbers with the unsharded function's.

* **pass**: same numbers, and exactly the planned collectives
* **fallback**: likewise, but an operation has no rule for blocks of this shape; its operand was gathered
* **fail**: anything else
* **skipped**: JAX does not run it on CPU, or no dim can be split

A sweep can be limited to some cases of each primitive; the rows count the cases that were judged.
"""


@dataclass(frozen=True)
class Result:
    """The verdict on one case."""

    primitive: str
    name: str
    outcome: str
    reason: str


def page(results: Mapping[str, Sequence[Result]]) -> str:
    """The page of the results by version of JAX."""
    return "\n".join([INTRO, *(_section(version, each) for version, each in results.items())])


def _section(version: str, results: Sequence[Result]) -> str:
    by_primitive: dict[str, list[Result]] = {}
    for result in results:
        by_primitive.setdefault(result.primitive, []).append(result)
    rows = [_row(name, each) for name, each in sorted(by_primitive.items())]
    header = ("primitive", "cases", *OUTCOMES, "gathered by")
    total = _row(f"**{len(rows)} primitives**", results)[:-1]
    parts = [f"## {version}\n", table(header, [*rows, (*total, "")]), _reasons(results), _failures(results)]
    return "\n".join(part for part in parts if part)


def _row(name: str, results: Iterable[Result]) -> tuple[object, ...]:
    found = list(results)
    count = Counter(result.outcome for result in found)
    stuck = Counter(result.reason for result in found if result.outcome == "fallback")
    return name, len(found), *(count[outcome] or "" for outcome in OUTCOMES), ", ".join(sorted(stuck))


def _reasons(results: Iterable[Result]) -> str:
    """Why cases were skipped; errors of JAX by their type."""
    count = Counter(result.reason.partition(":")[0] for result in results if result.outcome == "skipped")
    return "\nSkipped: " + "; ".join(f"{n} {reason}" for reason, n in count.most_common()) + ".\n" if count else ""


def _failures(results: Iterable[Result]) -> str:
    failed = [f"* `{result.name}`: {result.reason}" for result in results if result.outcome == "fail"]
    return "\n".join(["Failed:\n", *failed, ""]) if failed else ""
