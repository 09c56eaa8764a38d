"""Text of docs/evidence/programs.md from the measured facts."""

from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any

from bench.programs.adapter import Adapter
from bench.programs.measure import LARGE, MESHES, TOPOLOGY
from bench.programs.steps import FREE, STEPS
from bench.report import summarised, table
from bench.zoo.page import quotient
from meshdsl.util.text import percent_text, seconds_text

Facts = Mapping[str, Any]
# free, and between XLA's layouts
SENT = {"free": "bytes", "between": "bytes, XLA's layouts"}
SECONDS = {"free": "seconds", "between": "seconds, XLA's layouts"}
ALONE = "seconds, batch alone"
LIMIT = 1.1  # of XLA's bytes; above it, the page says why
INTRO = """# Public programs

Training steps that others published, imported from checkouts of their repositories and measured by
`make zoo CHECKOUTS=folder`. The step is the author's own, with the author's model, optimizer and first state; batches
are random numbers of the same shapes. `bench/programs` has an adapter for each; no code of theirs is in this
repository.

The batch is split over the data axes of each mesh (`pod` too, where there is one), everything else left open.
"""
CHANGED = """
## What changes

Lines of the program that change, and lines of an older program that have to change for today's jax and libraries,
whatever runs it.
"""
NUMBERS = f"""
## Numbers

At small size, on {", ".join(f"`{mesh}`" for mesh in MESHES)}.

* **check**: the largest error among the results of one step from the trained state, relative to the largest value of
  that result, against the step on one device (one written for `jax.pmap`: against all devices simulated); first under
  the plan of a call, then under a plan that divides as much as it can (`divide="most"`)
* **divided**: the share of the compute that the second plan divides over each axis
* **verified**: both compiled programs communicate exactly as planned
* **{STEPS} steps**: the largest error of state and results after {STEPS} steps in a row, each on another batch, under
  the second plan, against the program as its author runs it (`jax.jit`, `nnx.jit`, or `jax.pmap` on as many devices)
* an error above 2e-4 is at most four times the change that rounding errors in the arguments cause
"""
BYTES = f"""
## Bytes at published size

Planned for `{LARGE}` of {TOPOLOGY} without a memory limit, compiled but not run; MB that one device sends per step,
read from the compiled programs. XLA's program is `jax.jit` of the step with only its batch sharded (for a step
written for `jax.pmap`, `jax.shard_map` over the data axis).

* **free**: our plan, everything but the batch left open
* **between**: our plan between the layouts that XLA chose for inputs and outputs
* **predicted**: predicted time of one step, free and between
* **alone**: predicted time between XLA's layouts if compute is divided over the data axis alone, as in XLA's program
"""


def page(programs: Mapping[str, Adapter], found: Mapping[str, Facts]) -> str:
    """Returns the page of the facts by program; programs without them are listed as not measured."""
    small = {name: facts["small"] for name, facts in found.items() if "small" in facts}
    large = {name: facts["large"] for name, facts in found.items() if "large" in facts}
    parts = [INTRO, _programs(programs), CHANGED, *_changes(programs)]
    parts += [NUMBERS, _numbers(small), *_missing(programs, small)]
    parts += [BYTES, _bytes(programs, large), *_missing(programs, large), "", *_above(large), "", *_machines(small)]
    text = "\n".join(parts).replace("\n\n\n", "\n\n") + "\n"
    return summarised(text, *_short(programs, small))


def _short(programs: Mapping[str, Adapter], found: Mapping[str, Facts]) -> Iterator[str]:
    lines = [len(each.changed) for each in programs.values()]
    yield f"Training programs that others published, with {min(lines)} to {max(lines)} lines changed: {len(programs)}."
    runs = [facts.get(mesh) for facts in found.values() for mesh in MESHES]
    right = sum(facts is not None and "error" not in facts for facts in runs)
    measured = f"Of {len(found)} that are measured so far, in {right} of {len(runs)} pairs of program and mesh"
    yield f"{measured}, numbers are those of one device and collectives those of the plan."


def _missing(programs: Mapping[str, Adapter], found: Mapping[str, Facts]) -> Iterator[str]:
    missing = [name for name in programs if name not in found]
    if missing:
        yield f"\nNot measured yet: {', '.join(missing)}."


def ratios(facts: Facts) -> dict[str, float]:
    """Returns our bytes over XLA's, planned freely and between XLA's layouts."""
    found = {kind: quotient(facts, sent, "XLA bytes") for kind, sent in SENT.items()}
    return {kind: ratio for kind, ratio in found.items() if ratio is not None}


def _times(ratio: float) -> str:
    return f"{ratio:.2f}" if isfinite(ratio) else "XLA sends none"


def _programs(programs: Mapping[str, Adapter]) -> str:
    rows = [
        (name, each.what, f"[{each.repository}](https://github.com/{each.repository}/tree/{each.commit})", lines)
        for name, each in programs.items()
        for lines in [f"{len(each.changed)}" + (f" + {len(each.aged)}" if each.aged else "")]
    ]
    return table(("program", "what", "repository", "lines changed"), rows)


def _changes(programs: Mapping[str, Adapter]) -> Iterator[str]:
    for name, each in programs.items():
        changed = "; ".join(each.changed) or "none"
        yield f"* {name}: {changed}" + (f". For today's libraries: {'; '.join(each.aged)}" if each.aged else "")


def _numbers(found: Mapping[str, Facts]) -> str:
    header = ("program", "mesh", "check", "divided", "verified", f"{STEPS} steps")
    rows = [(name, mesh, *_row(facts.get(mesh))) for name, facts in found.items() for mesh in MESHES]
    return table(header, rows)


def _row(facts: Facts | None) -> tuple[str, str, str, str]:
    if facts is None:
        return "ends the process", "", "", ""
    if "error" in facts:
        return f"**{facts['error'].splitlines()[0]}**", "", "", ""
    shares = ", ".join(f"{share:.0%} {axis}" for axis, share in facts["shares"][1].items())
    return ", ".join(f"{worst:.0e}" for worst in facts["checked"]), shares, "yes", f"{facts['in a row']:.0e}"


def _bytes(programs: Mapping[str, Adapter], found: Mapping[str, Facts]) -> str:
    header = ("program", "size", "operations", "plan s", "gap", "MB XLA", "free", "between", "predicted", "alone")
    return table(header, [(name, programs[name].large, *_sent(facts)) for name, facts in found.items()])


def _sent(facts: Facts) -> tuple[str, ...]:
    ours = [f"{facts[SENT[kind]] / 1e6:.1f} ({_times(ratio)})" for kind, ratio in ratios(facts).items()]
    theirs = f"{facts['XLA bytes'] / 1e6:.1f}" if "XLA bytes" in facts else ""
    predicted = [seconds_text(facts[name]) for name in SECONDS.values() if name in facts]
    planned = f"{facts['operations']}", f"{facts['plan seconds']:.0f}", percent_text(facts["gap"])
    alone = seconds_text(facts[ALONE]) if ALONE in facts else ""
    return *planned, theirs, *ours, *[""] * (2 - len(ours)), ", ".join(predicted), alone


def _above(found: Mapping[str, Facts]) -> Iterator[str]:
    """Yields how many programs miss the goal, and each of them with its cause."""
    all_ratios = {name: ratios(facts) for name, facts in found.items()}
    for kind in SENT:
        known = {name: each[kind] for name, each in all_ratios.items() if kind in each}
        above = {name: ratio for name, ratio in known.items() if ratio > LIMIT}
        if known:
            missed = f"{len(above)} of {len(known)} programs miss it"
            yield f"* {kind}: the goal is at most {LIMIT} times XLA's bytes; {missed}"
        for name, ratio in above.items():
            yield f"    * {name}, {_times(ratio)}: {_cause(kind, found[name])}"


def _cause(kind: str, facts: Facts) -> str:
    """Returns what the bytes above XLA's buy, or why they are sent."""
    ours, alone = facts[SECONDS[kind]], facts.get(ALONE, 0.0)
    if ours < alone:
        divided = f"the planner minimises time, and divides compute over `{FREE}` as well"
        return f"{divided}: {seconds_text(ours)} predicted instead of {seconds_text(alone)}"
    return "cause not known"


def _machines(found: Mapping[str, Facts]) -> Iterator[str]:
    yield from dict.fromkeys(facts["machine"] for facts in found.values() if "machine" in facts)
