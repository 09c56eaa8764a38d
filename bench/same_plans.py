"""Compares the plans of two versions of the planner, exactly, and their planning times.

python -m bench.same_plans record OUT.json [--quick] [--only GLOB] [--group NAME] [--instances DIR]
python -m bench.same_plans compare A.json B.json [--common]
python -m bench.same_plans time --other CHECKOUT [--quick] [--repeat 3] [--only GLOB] [--group NAME]

``record`` plans the cases of ``bench.plan_cases`` one after the other and writes, for each plan, layouts of all inputs
and outputs, collectives in order, predicted seconds, lower bound and memory, number of operations, and digests of the
sections of the saved plan (without source positions, texts and the fingerprint, which change when code moves).
``compare`` prints every difference between two recordings, floats compared exactly, and exits with 1 if there are any.
``time`` alternates between this checkout and another one; each measurement runs in a fresh process that has planned the
case once before. Both checkouts need this file; each process runs in the root of its own with ``PYTHONPATH=.``.

Contest instances (``--instances``, a folder with ``A.json.gz`` and so on) are solved under a fake clock that advances
by ``TICK`` seconds per reading: the work up to the deadline is fixed, and HiGHS never reaches its own limit in real
seconds. A solver that reads the clock more or less often per step does a different amount of work; B and G are proved
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
CLOCKS = ("processor", "wall")  # of planning; tracing is measured separately
TICK, READINGS = 1000.0, 300  # seconds per reading of the fake clock, and readings until the deadline


def main() -> int:
    """Runs the command and returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    chosen = argparse.ArgumentParser(add_help=False)
    chosen.add_argument("--quick", action="store_true", help="a third of the cases, in under two minutes")
    chosen.add_argument("--only", default="*", metavar="GLOB", help="cases by name, such as 'models/gpt*'")
    chosen.add_argument("--group", help="cases of one group, such as pipelines")
    chosen.add_argument("--instances", type=Path, metavar="DIR", help="folder of contest instances (default: none)")
    commands.add_parser("record", parents=[chosen]).add_argument("file", type=Path)
    comparing = commands.add_parser("compare")
    comparing.add_argument("files", type=Path, nargs=2)
    comparing.add_argument("--common", action="store_true", help="compare only cases that are in both recordings")
    timing = commands.add_parser("time", parents=[chosen])
    timing.add_argument("--other", type=Path, required=True, metavar="CHECKOUT")
    timing.add_argument("--repeat", type=int, default=3)
    commands.add_parser(
        "measure", parents=[chosen], help="used by time: print the seconds of planning one case for the second time"
    )
    options = parser.parse_args()
    if options.command == "compare":
        return compare(*options.files, options.common)
    cases = select(options)
    if options.command == "record":
        return int(record(cases, options.file) > 0)
    if options.command == "time":
        compare_times(list(cases), options.other.resolve(), options.repeat, options.instances)
    else:
        (measure,) = cases.values()
        measure()
        print(json.dumps(measure()["planning"]))
    return 0


def select(options: argparse.Namespace) -> dict[str, Measure]:
    """Returns the selected cases; prints which groups are skipped for lack of packages or instances."""
    cases: dict[str, Measure] = {
        name: partial(measure_plan, case.make) for name, case in plan_cases().items() if case.quick or not options.quick
    }
    if options.instances:
        names = QUICK_INSTANCES if options.quick else INSTANCES
        cases |= {f"contest/{name}": partial(measure_contest, options.instances / f"{name}.json.gz") for name in names}
    else:
        print("contest: skipped, no --instances", file=sys.stderr)
    if missing := missing_zoo_packages():
        print(f"zoo: skipped, not installed: {', '.join(missing)}", file=sys.stderr)
    group = f"{options.group or '*'}/*"
    cases = {name: case for name, case in cases.items() if fnmatchcase(name, options.only) and fnmatchcase(name, group)}
    if not cases:
        raise SystemExit(f"no case matches --only {options.only!r} and --group {options.group!r}")
    return cases


# ------------------------------------------------------------------------------------------------------------ recording


def record(cases: Mapping[str, Measure], file: Path) -> int:
    """Measures cases one after the other, writes the recording, and returns how many failed unexpectedly.

    A MeshDSLError is a result (an infeasible case), not a failure.
    """
    found: dict[str, Facts] = {}
    begin = time.perf_counter()
    for number, (name, measure) in enumerate(cases.items(), 1):
        print(f"[{number}/{len(cases)}] {name}: ", end="", flush=True)
        start = time.perf_counter()
        try:
            found[name] = measure()
        except Exception as error:  # a failed case must not lose the others
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
        "seconds": time.perf_counter() - begin,
    }
    file.write_text(json.dumps({"made": made, "cases": found}, indent=1))
    failed = [name for name, facts in found.items() if "failed" in facts["plan"]]
    print(f"{len(found)} cases in {made['seconds']:.0f} s, {len(failed)} failed: {file}", *failed, sep="\n  ")
    return len(failed)


def measure_plan(make: Callable[[], Problem]) -> Facts:
    """Plans a problem; returns the facts of its plan (or of its error) and the seconds of planning."""
    problem = make()
    begin = time.perf_counter()
    problem.sharded.stages(*problem.args)  # traces the step, so that planning does not
    wall, processor = time.perf_counter(), time.process_time()
    planned: md.Plan | md.MeshDSLError
    try:
        planned = problem.sharded.plan(*problem.args)
    except md.MeshDSLError as error:
        planned = error
    planning = {"wall": time.perf_counter() - wall, "processor": time.process_time() - processor, "trace": wall - begin}
    return {"plan": plan_facts(planned) if isinstance(planned, md.Plan) else error_facts(planned), "planning": planning}


def plan_facts(plan: md.Plan) -> Facts:
    """Returns the decisions and predictions of a plan."""
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


def error_facts(error: md.MeshDSLError) -> Facts:
    """Returns the class of an error and the minimum feasible memory, if the message has one."""
    found = re.search(r"least \w+ is ([\d.]+ \w+)", str(error))
    return {"error": type(error).__name__, "least memory": found and found[1]}


def pipeline_facts(plan: md.Plan) -> Facts | None:
    """Returns layers per stage, ticks, bubble, stash sizes and forecasts of a pipeline."""
    found = plan.pipeline
    if found is None:
        return None
    facts = {"layers": list(found.layers), "ticks": found.ticks, "bubble": found.bubble, "stash": list(found.stash)}
    if found.axis and found.costs:
        facts |= {"lockstep": found.forecast.lockstep, "asynchronous": found.forecast.asynchronous}
    return facts


def saved_digests(plan: md.Plan) -> dict[str, str]:
    """Returns a digest per section of the saved plan that does not depend on sources or texts."""
    with tempfile.TemporaryDirectory() as folder:
        plan.save(Path(folder) / "plan.json")
        saved = json.loads((Path(folder) / "plan.json").read_text())
    saved["spans"] = [span[1:] for span in saved["spans"]]
    parts = ("peak_op", "held_values", "operations", "spans", "layouts", "signatures", "ops", "values", "uses", "moves")
    return {part: hashlib.sha256(json.dumps(saved[part]).encode()).hexdigest()[:16] for part in parts}


# -------------------------------------------------------------------------------------------------------------- contest


def measure_contest(file: Path) -> Facts:
    """Solves a contest instance with a fixed amount of work and returns its answer."""
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
    """Replaces ``time.perf_counter`` by a clock that advances ``TICK`` seconds per reading.

    Raises RuntimeError if it was never read.
    """
    readings = count()
    with mock.patch.object(time, "perf_counter", lambda: TICK * next(readings)):
        yield
    if next(readings) == 0:
        raise RuntimeError("the contest's solver does not read time.perf_counter, so its work is not fixed")


# ------------------------------------------------------------------------------------------------------------ comparing


def compare(first: Path, second: Path, common: bool) -> int:
    """Prints the differences of two recordings and the ratios of their planning times; returns 1 if they differ."""
    a, b = (json.loads(file.read_text()) for file in (first, second))
    for key in ("versions", "python", "revision"):
        print(f"{key}: {a['made'][key]} | {b['made'][key]}")
    both = [name for name in a["cases"] if name in b["cases"]]
    rows = [] if common else [f"{name}: only in one recording" for name in a["cases"].keys() ^ b["cases"].keys()]
    different = len(rows)
    for name in both:
        changes = list(differences(a["cases"][name]["plan"], b["cases"][name]["plan"]))
        rows += [f"{name}: {row}" for row in changes]
        different += bool(changes)
    for row in rows:
        print(row)
    print(f"{len(both)} cases in both, {different} different, {len(rows)} differences")
    for clock in CLOCKS:
        pairs = {name: [x["cases"][name]["planning"][clock] for x in (a, b)] for name in both}
        print_ratios({name: second / first for name, (first, second) in pairs.items() if first and second}, clock)
    return int(bool(rows))


def differences(a: Any, b: Any, path: str = "") -> Iterator[str]:
    """Yields one line per value that is not exactly equal in both."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys((*a, *b)):
            yield from differences(a.get(key, "absent"), b.get(key, "absent"), f"{path}.{key}" if path else key)
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, pair in enumerate(zip(a, b, strict=True)):
            yield from differences(*pair, f"{path}[{i}]")
    elif a != b:
        numbers = all(isinstance(x, int | float) for x in (a, b))
        yield f"{path}: {a} | {b}" + (f" (relative {abs(a - b) / max(abs(a), abs(b)):.2e})" if numbers else "")


def print_ratios(ratios: Mapping[str, float], what: str) -> None:
    """Prints the median ratio, and the largest with its case."""
    if ratios:
        largest = max(ratios, key=lambda name: ratios[name])
        most = f"{ratios[largest]:.3f} ({largest})"
        print(f"{what} seconds, second / first: median {median(ratios.values()):.3f}, largest {most}")


# --------------------------------------------------------------------------------------------------------------- timing


def compare_times(names: Sequence[str], other: Path, repeat: int, instances: Path | None) -> None:
    """Prints the ratio of planning seconds, this checkout over another; each is the minimum of ``repeat`` processes."""
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
        print_ratios(known, clock)


def _measured(checkout: Path, name: str, instances: Path | None) -> Facts:
    """Returns the planning seconds of a case in a fresh process that has planned it once before."""
    pattern = re.sub(r"([\[?*])", r"[\1]", name)
    command = [sys.executable, "-m", "bench.same_plans", "measure", "--only", pattern]
    command += ["--instances", str(instances.resolve())] if instances else []
    ran = subprocess.run(command, cwd=checkout, env={**os.environ, "PYTHONPATH": "."}, capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(f"{name} in {checkout}:\n{ran.stderr}")
    return json.loads(ran.stdout.splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main())
