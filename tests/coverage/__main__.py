"""Judge the cases, and write the page of all results so far. Cases judged before are not judged again.

JAX_NUM_CPU_DEVICES=8 python -m tests.coverage --primitive 'scatter*' --limit 20
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import jax
import numpy as np

from bench.report import versions
from tests.coverage import audit
from tests.coverage.cases import Case, cases
from tests.coverage.judge import judge
from tests.coverage.page import Result, page
from tests.quick_compiles import compile_quickly

FORGET = 100  # compiled programs are kept until so many cases have run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--primitive", default="*", metavar="GLOB", help="only these primitives")
    parser.add_argument("--limit", type=int, help="at most so many cases of each primitive")
    parser.add_argument("--again", action="store_true", help="judge them again")
    parser.add_argument("--results", type=Path, default=Path(".cache/coverage"), help="folder of what was found so far")
    parser.add_argument("--page", type=Path, default=Path("docs/evidence/coverage.md"))
    asked = parser.parse_args()
    compile_quickly()
    file = asked.results / f"jax-{jax.__version__}.jsonl"
    known = {} if asked.again else read(file)
    sweep([case for case in cases(asked.primitive, asked.limit) if case.name not in known], file)
    asked.page.parent.mkdir(exist_ok=True)
    audit.PAGE.write_text(audit.page())
    asked.page.write_text(page({_title(file): list(read(file).values()) for file in sorted(asked.results.iterdir())}))


def sweep(todo: list[Case], file: Path) -> None:
    """Judge the cases one by one, and add each verdict to the file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        file.write_text(json.dumps(f"{versions()}, numpy {np.__version__}: {len(cases())} cases in JAX") + "\n")
    count: Counter[str] = Counter()
    start = time.time()
    for i, case in enumerate(todo, 1):
        verdict = judge(case)
        result = Result(case.primitive, case.name, verdict.outcome, verdict.reason, verdict.bytes)
        with file.open("a") as out:
            out.write(json.dumps(asdict(result)) + "\n")
        count[verdict.outcome] += 1
        if verdict.outcome == "fail":
            print(f"{case.name}: {verdict.reason}", flush=True)
        if i % FORGET == 0 or i == len(todo):
            jax.clear_caches()
            print(f"{i} of {len(todo)} cases in {time.time() - start:.0f} s: {_counted(count)}", flush=True)


def read(file: Path) -> dict[str, Result]:
    """The last verdict on each case, by its name."""
    lines = file.read_text().splitlines()[1:] if file.exists() else []
    return {result.name: result for result in (Result(**json.loads(line)) for line in lines)}


def _title(file: Path) -> str:
    with file.open() as lines:
        return str(json.loads(next(lines)))


def _counted(count: Iterable[str]) -> str:
    return ", ".join(f"{n} {outcome}" for outcome, n in sorted(Counter(count).items()))


if __name__ == "__main__":
    main()
