"""Seconds, predicted step and gap of planning with every effort: models of every family and of other libraries.

python -m bench.efforts [GLOB ...] [--efforts fast,default] [--again] [--page]

Processor seconds of planning after tracing, in a process that has planned before; where two threads run, both count.
The batch is split over ``data``, everything else left open, memory unlimited. Results are cached in .cache/efforts;
``--again`` measures anew. Cases are named ``model/topology/mesh``; the zoo's need the packages of
``bench/zoo/requirements.txt``.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from bench.example_steps import load_example
from bench.plan_cases import ZOO_EXCLUDED, missing_zoo_packages
from bench.planner.cases import FAMILIES, MESHES, RULES, TOPOLOGY, program_of
from bench.report import summarised, table, versions
from meshdsl.api import Program, parallelize
from meshdsl.layouts.mesh import Mesh
from meshdsl.planner.limits import EFFORTS
from meshdsl.util.text import percent_text, seconds_text

CACHE, PAGE = Path(".cache/efforts"), Path("docs/evidence/effort.md")
INTRODUCTION = """# Effort of planning

Written by `python -m bench.efforts --page`. One model of every family in `models/`, and the training steps of other
libraries (the [zoo](zoo.md)), planned with each `effort` ([what it says](../howto/planning_time.md)): processor seconds
of planning after tracing, in a process that has planned before; where two threads run, both count. The batch is split
over `data`, everything else left open, memory unlimited. The column *step* says by how much the predicted step is
slower than that with `prove`; it is faster where a quicker search happened to find more. Wide gaps are those of steps
whose small collectives are sent as one: with every effort, the bound has the latencies for free that they might share;
on three axes, all but one.
"""
UNLIMITED = 1e15
GOALS = {"fast": ((1.0, 2.0), 0.03), "default": ((3.0, 6.0), 0.01)}  # seconds on two axes and on three, gap
Facts = Mapping[str, Any]


class Case(NamedTuple):
    """A step on a mesh; ``make`` builds the program."""

    make: Callable[[], Program]
    mesh: Mesh
    rules: object = None


def cases() -> Iterator[tuple[str, Case]]:
    """Yields all cases by name."""
    for axes in MESHES:
        for name in FAMILIES:
            yield f"{name}/{TOPOLOGY}/{axes}", Case(partial(program_of, name), Mesh.parse(axes, TOPOLOGY), RULES)
    if missing_zoo_packages():
        return
    from bench.zoo.measure import CASES, build_case

    for name in (name for name in CASES if name not in ZOO_EXCLUDED):
        for topology, axes in product(("cpu", TOPOLOGY), MESHES):
            make = partial(lambda name: build_case(name).program(), name)
            yield f"{name}/{topology}/{axes}", Case(make, Mesh.parse(axes, topology))


def main() -> None:
    """Measures the selected cases that are not cached, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("globs", nargs="*", metavar="GLOB", default=["*"], help="cases by name, such as 'gpt*'")
    parser.add_argument("--efforts", default=",".join(EFFORTS), help="which to measure; others are read if cached")
    parser.add_argument("--page", action="store_true", help="write the page of evidence")
    parser.add_argument("--again", action="store_true", help="measure what is cached as well")
    options = parser.parse_args()
    CACHE.mkdir(parents=True, exist_ok=True)
    _warm_up()
    found: dict[str, dict[str, Facts]] = {}
    for name, case in cases():
        if any(fnmatchcase(name, glob) for glob in options.globs or ["*"]):
            found[name] = _measured(name, case, options.efforts.split(","), options.again)
    if options.page:
        summary = list(_summary(found))
        made = f"2 x86-64 cores, busy with other programs; {versions()}"
        text = "\n\n".join([INTRODUCTION.rstrip(), _table(found), "\n".join(f"* {line}" for line in summary), made])
        PAGE.write_text(summarised(text + "\n", *(line for line in summary if "plans within" in line)))
    else:
        print(_table(found), *_summary(found), versions(), sep="\n")


def _warm_up() -> None:
    """Loads the compiled loops of the planner."""
    example = load_example("mlp").program
    for axes in MESHES:
        parallelize(example.step, Mesh.parse(axes, TOPOLOGY), example.layouts).plan(*example.args)


def _measured(name: str, case: Case, efforts: Sequence[str], again: bool) -> dict[str, Facts]:
    """Returns the facts of a case by effort: measured now, or before."""
    file = CACHE / f"{name.replace('/', ' ')}.json"
    facts = json.loads(file.read_text()) if file.exists() else {}
    todo = [effort for effort in efforts if again or effort not in facts]
    program = case.make() if todo else None
    for effort in todo:
        assert program is not None
        rules = case.rules or program.rules
        sharded = parallelize(program.step, case.mesh, program.layouts, rules=rules, memory=UNLIMITED, effort=effort)
        stages = sharded.stages(*program.args)
        _ = stages.program
        start = time.process_time()
        plan = stages.planned.plan
        took = time.process_time() - start
        operations = sum(plan.operations.values())
        facts[effort] = {"seconds": took, "step": plan.seconds, "gap": plan.gap, "operations": operations}
        print(f"{name} {effort}: {took:.2f} s, step {plan.seconds:.6g}, gap {plan.gap:.3%}", flush=True)
        file.write_text(json.dumps(facts))
    return facts


def _table(found: Mapping[str, Mapping[str, Facts]]) -> str:
    """Returns a row per case: seconds and gap of every effort; of the step that of ``prove``, and what others add."""
    header = ["model", "topology", "mesh", "operations", "step"]
    for effort in EFFORTS:
        header += [f"{effort} s", "gap", *(["step"] if effort != "prove" else [])]
    rows = []
    for name, facts in found.items():
        best = facts.get("prove") or next(iter(facts.values()))
        row = [*name.split("/"), str(best["operations"]), seconds_text(best["step"])]
        for effort in EFFORTS:
            one = facts.get(effort)
            row += [f"{one['seconds']:.1f}", percent_text(one["gap"])] if one else ["", ""]
            if effort != "prove":
                row.append(f"{one['step'] / best['step'] - 1:+.2%}" if one else "")
        rows.append(row)
    return table(header, rows)


def _summary(found: Mapping[str, Mapping[str, Facts]]) -> Iterator[str]:
    """Yields a sentence per effort on how many cases meet its goals, then those that do not."""
    failing = []
    for effort, (seconds, gap) in GOALS.items():
        both = {name: (each[effort], each["prove"]) for name, each in found.items() if {effort, "prove"} <= set(each)}
        if not both:
            continue
        goals = {name: seconds[name.rpartition("/")[2].count(",") > 1] for name in both}
        late = {name: one["seconds"] for name, (one, _) in both.items() if one["seconds"] > goals[name]}
        wide = {name: one["gap"] for name, (one, prove) in both.items() if one["gap"] > gap >= prove["gap"]}
        slowest = max(one["step"] / prove["step"] - 1 for one, prove in both.values())
        took, proving = (sum(facts[i]["seconds"] for facts in both.values()) for i in (0, 1))
        in_time = (
            f"{len(both) - len(late)} of {len(both)} plans within {seconds[0]:.0f} s, {seconds[1]:.0f} s on three axes"
        )
        sums = f"{took:.0f} s instead of {proving:.0f} s for all"
        yield f"`{effort}`: {in_time}; {sums}; predicted steps at most {slowest:.2%} slower."
        failing += [f"`{effort}`, {name}: {taken:.1f} s" for name, taken in late.items()]
        failing += [
            f"`{effort}`, {name}: gap {open_:.1%}, with `prove` within {gap:.0%}" for name, open_ in wide.items()
        ]
    yield from failing


if __name__ == "__main__":
    main()
