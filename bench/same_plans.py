"""Whether two versions of the planner make the same plans, and how long each takes.

python -m bench.same_plans record OUT.json [--quick] [--only GLOB] [--group NAME] [--instances DIR]
python -m bench.same_plans compare A.json B.json [--common]
python -m bench.same_plans time --other CHECKOUT [--quick] [--repeat 3] [--only GLOB] [--group NAME]

``record`` plans the cases of ``bench.plan_cases`` one after the other and writes what each plan decides: layouts of all
inputs and outputs, collectives in order, predicted seconds, bound and memory, number of operations, and digests of the
parts of the saved plan (positions of sources, texts and the fingerprint aside, for they change when code moves).
``compare`` prints every difference between two recordings, floats compared exactly, and exits with 1 if there are any.
``time`` plans cases in this checkout and in another one, by turns, each time in a fresh process that has planned the
case once before. Both checkouts need this file; each process runs in the root of its own with ``PYTHONPATH=.``.

Contest instances (``--instances``, a folder with ``A.json.gz`` and so on) are solved with a clock that counts how often
it is read: every reading adds ``TICK`` seconds, so the work up to the deadline is fixed, and HiGHS never reaches its
own limit in real seconds. A solver that reads the clock more or less often per step does other work; B and G are proved
optimal before the deadline, so cost and bound must be the same even then.

Run from the root of the checkout. The zoo's cases need the packages of ``bench/zoo/requirements.txt``; those of the
demo's GPT need grain, which is not among them.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import meshdsl as md
from bench.plan_cases import Problem, missing_zoo_packages, plan_cases
from bench.report import versions

Facts = dict[str, Any]
Measure = Callable[[], Facts]
ROOT = Path(__file__).resolve().parent.parent
INSTANCES, QUICK_INSTANCES = ("A", "B", "G", "V"), ("B", "G", "V")
CLOCKS = ("processor", "wall")  # both of planning alone, tracing apart
TICK, READINGS = 1000.0, 300  # seconds that a reading of the contest's clock adds, and how many there are


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    chosen = argparse.ArgumentParser(add_help=False)
    chosen.add_argument("--quick", action="store_true", help="a third of the cases, in under two minutes")
    chosen.add_argument("--only", default="*", metavar="GLOB", help="cases by name, such as 'models/gpt*'")
    chosen.add_argument("--group", help="cases of one group, such as pipelines")
    chosen.add_argument("--instances", type=Path, metavar="DIR", help="folder of contest instances; without, none")
    commands.add_parser("record", parents=[chosen]).add_argument("file", type=Path)
    comparing = commands.add_parser("compare")
    comparing.add_argument("files", type=Path, nargs=2)
    comparing.add_argument("--common", action="store_true", help="only the cases that both have")
    timing = commands.add_parser("time", parents=[chosen])
    timing.add_argument("--other", type=Path, required=True, metavar="CHECKOUT")
    timing.add_argument("--repeat", type=int, default=3)
    commands.add_parser("measure", parents=[chosen], help="of time: the case's seconds, planned for the second time")
    asked = parser.parse_args()
    if asked.command == "compare":
        return compare(*asked.files, asked.common)
    cases = select(asked)
    if asked.command == "record":
        return int(record(cases, asked.file) > 0)
    if asked.command == "time":
        compare_times(list(cases), asked.other.resolve(), asked.repeat, asked.instances)
    else:
        (measure,) = cases.values()
        measure()
        print(json.dumps(measure()["planning"]))
    return 0


def select(asked: argparse.Namespace) -> dict[str, Measure]:
    """The cases that were asked for; says which are skipped because something is not installed or given."""
    found = plan_cases()
    cases: dict[str, Measure] = {
        name: partial(measure_plan, case.make) for name, case in found.items() if case.quick or not asked.quick
    }
    if asked.instances:
        names = QUICK_INSTANCES if asked.quick else INSTANCES
        cases |= {f"contest/{name}": partial(measure_contest, asked.instances / f"{name}.json.gz") for name in names}
    else:
        print("contest: skipped, no --instances", file=sys.stderr)
    if missing := missing_zoo_packages():
        print(f"zoo: skipped, not installed: {', '.join(missing)}", file=sys.stderr)
    group = f"{asked.group or '*'}/*"
    cases = {name: case for name, case in cases.items() if fnmatchcase(name, asked.only) and fnmatchcase(name, group)}
    if not cases:
        raise SystemExit("no such cases")
    return cases


# ------------------------------------------------------------------------------------------------------------ recording


def record(cases: Mapping[str, Measure], file: Path) -> int:
    """Measure cases one after the other, and write what was found; how many failed, which is no MeshDSLError."""
    found: dict[str, Facts] = {}
    begun = time.perf_counter()
    for number, (name, measure) in enumerate(cases.items(), 1):
        print(f"[{number}/{len(cases)}] {name}: ", end="", flush=True)
        start = time.perf_counter()
        try:
            found[name] = measure()
        except Exception as error:  # the other cases are recorded all the same
            traceback.print_exc()
            found[name] = {"plan": {"failed": type(error).__name__}, "planning": dict.fromkeys(CLOCKS, 0.0)}
        wall = found[name]["planning"]["wall"]
        print(f"planned in {wall:.2f} s, {time.perf_counter() - start:.2f} s in all", flush=True)
    revision = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    made = {
        "python": sys.executable,
        "versions": versions(),
        "meshdsl": md.__file__,
        "revision": revision.stdout.strip(),
        "zoo packages that are missing": missing_zoo_packages(),
        "seconds": time.perf_counter() - begun,
    }
    file.write_text(json.dumps({"made": made, "cases": found}, indent=1))
    failed = [name for name, facts in found.items() if "failed" in facts["plan"]]
    print(f"{len(found)} cases in {made['seconds']:.0f} s, {len(failed)} failed: {file}", *failed, sep="\n  ")
    return len(failed)


def measure_plan(make: Callable[[], Problem]) -> Facts:
    """What the plan of a problem decides, or which error there is instead, and the seconds that it took."""
    problem = make()
    begun = time.perf_counter()
    trace(problem)
    wall, processor = time.perf_counter(), time.process_time()
    planned: md.Plan | md.MeshDSLError
    try:
        planned = problem.sharded.plan(*problem.args)
    except md.MeshDSLError as error:
        planned = error
    planning = {"wall": time.perf_counter() - wall, "processor": time.process_time() - processor, "trace": wall - begun}
    return {"plan": plan_facts(planned) if isinstance(planned, md.Plan) else error_facts(planned), "planning": planning}


def plan_facts(plan: md.Plan) -> Facts:
    """What a plan decides and predicts."""
    return {
        "seconds": plan.seconds,
        "lower bound": plan.lower_bound,
        "simulated seconds": plan.simulated_seconds,
        "memory": plan.memory,
        "operations": sum(plan.operations.values()),
        "padded": [list(pair) for pair in plan.padded],
        "inputs": {array.path: str(array.layout) for array in plan.inputs},
        "outputs": {array.path: str(array.layout) for array in plan.outputs},
        "collectives": [f"{c.kind} {','.join(c.axes)} {c.bytes} x{c.trips} {c.phase}" for c in plan.collectives],
        "pipeline": pipeline_facts(plan),
        "saved": saved_digests(plan),
    }


def trace(problem: Problem) -> None:
    """Trace the step, so that planning it does not have to."""
    problem.sharded.stages(*problem.args)


def error_facts(error: md.MeshDSLError) -> Facts:
    """The class of an error, and the least memory that a plan needs if the error says it."""
    found = re.search(r"least \w+ is ([\d.]+ \w+)", str(error))
    return {"error": type(error).__name__, "least memory": found and found[1]}


def pipeline_facts(plan: md.Plan) -> Facts | None:
    """Ticks, stages and what they keep."""
    found = plan.pipeline
    if found is None:
        return None
    facts = {"layers": list(found.layers), "ticks": found.ticks, "bubble": found.bubble, "stash": list(found.stash)}
    if found.axis and found.costs:
        facts |= {"lockstep": found.forecast.lockstep, "asynchronous": found.forecast.asynchronous}
    return facts


def saved_digests(plan: md.Plan) -> dict[str, str]:
    """A digest per part of the saved plan that says what operations do: no sources, no texts."""
    with tempfile.TemporaryDirectory() as folder:
        plan.save(Path(folder) / "plan.json")
        saved = json.loads((Path(folder) / "plan.json").read_text())
    saved["spans"] = [span[1:] for span in saved["spans"]]
    parts = ("peak_op", "held_values", "operations", "spans", "layouts", "signatures", "ops", "values", "uses", "moves")
    return {part: hashlib.sha256(json.dumps(saved[part]).encode()).hexdigest()[:16] for part in parts}


# -------------------------------------------------------------------------------------------------------------- contest


def measure_contest(file: Path) -> Facts:
    """The answer to a contest instance for a fixed amount of work."""
    from meshdsl.plan import load_instance, solve

    instance = load_instance(file)
    wall, processor = time.perf_counter(), time.process_time()
    with counting_clock():
        answer = solve(instance, TICK * READINGS, seed=0)
    planning = {"wall": time.perf_counter() - wall, "processor": time.process_time() - processor, "trace": 0.0}
    choice = hashlib.sha256(json.dumps(list(map(int, answer.choice))).encode()).hexdigest()[:16]
    score = instance.score(answer.choice)
    facts = {"cost": int(score.cost), "peak": int(score.peak), "bound": int(answer.bound), "choice": choice}
    return {"plan": facts, "planning": planning}


@contextmanager
def counting_clock() -> Iterator[None]:
    """``time.perf_counter`` is ``TICK`` seconds later at every reading; RuntimeError if nobody has read it."""
    readings = count()
    with mock.patch.object(time, "perf_counter", lambda: TICK * next(readings)):
        yield
    if next(readings) == 0:
        raise RuntimeError("the contest's solver does not read time.perf_counter, so its work is not fixed")


# ------------------------------------------------------------------------------------------------------------ comparing


def compare(first: Path, second: Path, common: bool) -> int:
    """Print how two recordings differ, and the ratio of their planning seconds; 1 if they differ."""
    a, b = (json.loads(file.read_text()) for file in (first, second))
    for key in ("versions", "python", "revision"):
        print(f"{key}: {a['made'][key]} | {b['made'][key]}")
    both = [name for name in a["cases"] if name in b["cases"]]
    rows = [] if common else [f"{name}: only in one recording" for name in a["cases"].keys() ^ b["cases"].keys()]
    different = len(rows)
    for name in both:
        found = list(differences(a["cases"][name]["plan"], b["cases"][name]["plan"]))
        rows += [f"{name}: {row}" for row in found]
        different += bool(found)
    for row in rows:
        print(row)
    print(f"{len(both)} cases in both, {different} different, {len(rows)} differences")
    for clock in CLOCKS:
        pairs = {name: [x["cases"][name]["planning"][clock] for x in (a, b)] for name in both}
        say_ratios({name: second / first for name, (first, second) in pairs.items() if first and second}, clock)
    return int(bool(rows))


def differences(a: Any, b: Any, path: str = "") -> Iterator[str]:
    """A row per value that is not exactly the same in both."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys((*a, *b)):
            yield from differences(a.get(key, "absent"), b.get(key, "absent"), f"{path}.{key}" if path else key)
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, pair in enumerate(zip(a, b, strict=True)):
            yield from differences(*pair, f"{path}[{i}]")
    elif a != b:
        numbers = all(isinstance(x, int | float) for x in (a, b))
        yield f"{path}: {a} | {b}" + (f" (relative {abs(a - b) / max(abs(a), abs(b)):.2e})" if numbers else "")


def say_ratios(ratios: Mapping[str, float], what: str) -> None:
    """The median, and the largest with its case."""
    if ratios:
        largest = max(ratios, key=lambda name: ratios[name])
        most = f"{ratios[largest]:.3f} ({largest})"
        print(f"{what} seconds, second / first: median {median(ratios.values()):.3f}, largest {most}")


# --------------------------------------------------------------------------------------------------------------- timing


def compare_times(names: Sequence[str], other: Path, repeat: int, instances: Path | None) -> None:
    """Planning seconds of this checkout over those of another, of the fastest of some processes each, by turns."""
    if not (other / "bench" / "same_plans.py").exists():
        raise SystemExit(f"{other} has no bench/same_plans.py; check out a revision that has it")
    ratios: dict[str, dict[str, float]] = {clock: {} for clock in CLOCKS}
    for name in names:
        pairs = [[_measured(checkout, name, instances) for checkout in (other, ROOT)] for _ in range(repeat)]
        row = []
        for clock, known in ratios.items():
            theirs, ours = (min(seconds[clock] for seconds in each) for each in zip(*pairs, strict=True))
            known[name] = ours / theirs
            row.append(f"{clock} {theirs:.3f} s, here {ours:.3f} s: {known[name]:.3f}")
        print(f"{name}: {'; '.join(row)}", flush=True)
    for clock, known in ratios.items():
        say_ratios(known, clock)


def _measured(checkout: Path, name: str, instances: Path | None) -> Facts:
    """Planning seconds of a case in a fresh process that has planned it once before."""
    pattern = re.sub(r"([\[?*])", r"[\1]", name)
    command = [sys.executable, "-m", "bench.same_plans", "measure", "--only", pattern]
    command += ["--instances", str(instances.resolve())] if instances else []
    ran = subprocess.run(command, cwd=checkout, env={**os.environ, "PYTHONPATH": "."}, capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(f"{name} in {checkout}:\n{ran.stderr}")
    return json.loads(ran.stdout.splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main())
