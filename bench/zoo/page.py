"""Text of docs/evidence/zoo.md from the measured facts."""

from collections.abc import Iterable, Iterator, Mapping
from statistics import median
from typing import Any

from bench.report import Ratio, summarised, table

Facts = Mapping[str, Any]
INTRO = """# Zoo

Training steps of other libraries, measured by `make zoo`: loss, gradients and optimizer on the mesh `data=4,model=2`,
the batch split over `data`, everything else left open. The models are small enough for 8 virtual CPU devices;
`bench/zoo` builds them.

* **worst error**: over all results, relative to the largest value of each, against the unsharded step; for mixture it
  is that of the attention biases, whose key part has a gradient of pure rounding error, which Adam divides by its own
  size (perturbing the arguments by a rounding error moves them by 2e-2)
* **verified**: the compiled program communicates exactly as planned
* **kB**: bytes that one device sends per step, read from the compiled programs; a data-dependent loop counts as one
  iteration
* **XLA**: the same step under `jax.jit`, given our input and output layouts
* **step**: time of our step over that of XLA's, median of interleaved steps, with a 95% interval
"""
OWN = """
## At XLA's own layouts

`jax.jit` with only the batch's sharding given; the layouts that XLA then chose for all inputs and outputs are pinned,
and our step is planned between them.
"""
FALLBACKS = """
## Fallbacks

Operations with an operand gathered because no rule allows shards of it, or because a length does not divide over the
devices (*uneven*), and the bytes that one device sends for it.
"""
# (goal, case) -> why the case misses the goal, where known
EIGHT = (
    "the planner minimises predicted time: compute is split over `model` as well, and its sums run over 8 devices "
    "instead of 4"
)
WHOLE = (
    "the plan gathers the batch and replicates all compute: latency is priced above compute, though the devices share "
    "2 cores"
)
COUNTED = "five of XLA's eleven collectives are in data-dependent loops and count once; none of ours is"
PRICED = (
    "latency is priced at more than twice this machine's: planned with 120 us, 85 collectives send half the "
    "bytes, in 0.92 of XLA's time"
)
OURS = "XLA is given our layouts, and sends {theirs} combined collectives between them, ours {ours}"
CAUSES = {
    ("step", "bart"): PRICED,
    ("step", "inference"): f"2 ms a step; {EIGHT}",
    **{("step", name): WHOLE for name in ("fourier", "recommender")},
    **{
        (
            "bytes",
            name,
        ): f"the planner minimises time, in which a latency is worth 135 kB: {ours} collectives against XLA's {theirs}"
        for name, ours, theirs in (("bart", 21, 69), ("regnet", 13, 50), ("convnext", 13, 25))
    },
    **{
        (goal, name): OURS.format(ours=ours, theirs=3)
        for name, ours in (("gpt2", 5), ("mamba2", 3))
        for goal in ("bytes", "step")
    },
    **{(goal, "equation"): COUNTED for goal in ("bytes", "own")},
    **{(goal, "inference"): EIGHT for goal in ("bytes", "own")},
}


def page(found: Mapping[str, Facts], names: Iterable[str] = ()) -> str:
    """Returns the page of the facts by case; cases of ``names`` without facts are listed as not measured."""
    missing = [name for name in names if name not in found]
    unmeasured = f"\nNot measured: {', '.join(missing)}.\n" if missing else ""
    parts = [
        INTRO,
        _main(found),
        unmeasured,
        _goals(found),
        OWN,
        _own(found),
        FALLBACKS,
        _fallbacks(found),
        _machines(found),
    ]
    return summarised("\n".join(parts) + "\n", *_short(found))


def _short(found: Mapping[str, Facts]) -> Iterator[str]:
    verified = sum("verify" in facts for facts in found.values())
    steps = f"{len(found)} training steps of other libraries"
    yield f"{steps} run sharded on 8 devices; {verified} communicate exactly as planned."
    times = [facts["step ratio"][0] for facts in found.values() if "step ratio" in facts]
    sent = [ratio for facts in found.values() if (ratio := _ratio(facts)) is not None]
    if times and sent:
        yield (
            f"Between the same layouts a step takes {median(times):.2f} of the time of XLA's partitioner "
            f"in the median, {max(times):.2f} at most, and sends {median(sent):.2f} of its bytes."
        )
    wrong = sum(facts.get("XLA right") is False for facts in found.values())
    yield f"XLA's partitioner computes wrong gradients in {wrong} of them."


def _main(found: Mapping[str, Facts]) -> str:
    header = ("case", "operations", "plan s", "worst error", "verified", "kB", "kB XLA", "ratio")
    rows = [(*_row(name, facts), _step(facts), _right(facts)) for name, facts in found.items()]
    return table((*header, "step (95%)", "XLA's gradients"), rows)


def _row(name: str, facts: Facts) -> tuple[str, ...]:
    return (
        name,
        str(facts["operations"]),
        f"{facts['plan seconds']:.1f}" if "plan seconds" in facts else "",
        f"{facts['worst error']:.0e}" if "worst error" in facts else "**differs**",
        "yes" if "verify" in facts else "**no**",
        _kilobytes(facts, "bytes"),
        _kilobytes(facts, "XLA bytes"),
        _ratio_text(_ratio(facts)),
    )


def _step(facts: Facts) -> str:
    return str(Ratio(*facts["step ratio"])) if "step ratio" in facts else ""


def _right(facts: Facts) -> str:
    if "XLA right" in facts:
        return "right" if facts["XLA right"] else "**wrong**"
    return "ends the process"


def _own(found: Mapping[str, Facts]) -> str:
    rows = [
        (
            name,
            _kilobytes(facts, "bytes, XLA's layouts"),
            _kilobytes(facts, "XLA bytes, own layouts"),
            _ratio_text(_own_ratio(facts)),
        )
        for name, facts in found.items()
    ]
    return table(("case", "kB", "kB XLA", "ratio"), rows)


def _goals(found: Mapping[str, Facts]) -> str:
    """Returns goals, results, and the cases that miss them with their causes."""
    planned = {name: ratio for name, facts in found.items() if (ratio := _ratio(facts)) is not None}
    own = {name: ratio for name, facts in found.items() if (ratio := _own_ratio(facts)) is not None}
    steps = {name: facts["step ratio"][0] for name, facts in found.items() if "step ratio" in facts}
    lines = ["\n## Goals\n"]
    if planned:
        lines.append(f"* bytes, planned freely, at most half of XLA's in the median: {median(planned.values()):.2f}")
        lines += _missed("bytes", planned, 0.5)
    if own:
        lines.append(f"* bytes at XLA's own layouts never more than XLA's: {max(own.values()):.2f} at most")
        lines += _missed("own", own, 1.0)
    if steps:
        lines.append(f"* step under 0.8 in the median: {median(steps.values()):.2f}")
        lines += _missed("step", steps, 0.8)
        lines.append(f"* step never above 1.05: {max(steps.values()):.2f} at most")
    return "\n".join(lines) + "\n"


def _missed(goal: str, ratios: Mapping[str, float], limit: float) -> list[str]:
    above = [(name, ratio) for name, ratio in ratios.items() if ratio > limit]
    return [f"    * {name}, {ratio:.2f}: {CAUSES.get((goal, name), 'cause not known')}" for name, ratio in above]


def _fallbacks(found: Mapping[str, Facts]) -> str:
    rows = [(name, *each) for name, facts in found.items() for each in facts["fallbacks"]]
    by_bytes = sorted(rows, key=lambda row: (-int(row[-1]), row))
    return table(("case", "operation", "line", "outcome", "bytes"), by_bytes) if by_bytes else "None."


def _machines(found: Mapping[str, Facts]) -> str:
    timed = [facts for facts in found.values() if "rounds" in facts]
    lines = dict.fromkeys(f"{facts['machine']}; {facts['rounds']} interleaved steps" for facts in timed)
    return "\n" + "\n".join(lines)


def _ratio(facts: Facts) -> float | None:
    return quotient(facts, "bytes", "XLA bytes")


def _own_ratio(facts: Facts) -> float | None:
    return quotient(facts, "bytes, XLA's layouts", "XLA bytes, own layouts")


def quotient(facts: Facts, ours: str, peer: str) -> float | None:
    """Returns our bytes over the peer's; 1 if neither sends any, None if one is unknown."""
    if ours not in facts or peer not in facts:
        return None
    return float(facts[ours] / facts[peer]) if facts[peer] else 1.0 if not facts[ours] else float("inf")


def _kilobytes(facts: Facts, what: str) -> str:
    return f"{facts[what] / 1e3:.1f}" if what in facts else ""


def _ratio_text(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"
