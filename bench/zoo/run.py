"""Every case of the zoo: planned, run, compared with the unsharded step and with the XLA partitioner.

python -m bench.zoo.run [case ...]

The partitioner gets the same step between the plan's own input and output layouts, and once more
with the batch alone stated. Each case has a process of its own, because the partitioner ends some of
them. What was measured is kept, and all of it is written to ``docs/zoo.md``; gaps stay what that page says of them
(``bench.zoo.gaps``).
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import jax

from bench.report import page_section
from bench.zoo.gaps import TITLE, replace_section
from bench.zoo.measure import CASES, measure
from bench.zoo.page import page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="case", help=f"of {', '.join(CASES)}; all by default")
    parser.add_argument("--part", choices=["plan", "time"], help="only plans and bytes, or only the time of steps")
    parser.add_argument("--rounds", type=int, default=20, help="steps of each program that are timed")
    parser.add_argument("--results", type=Path, default=Path(".cache/zoo"), help="folder of what was measured so far")
    parser.add_argument("--page", type=Path, default=Path("docs/zoo.md"))
    parser.add_argument("--apart", action="store_true", help="one part of one case, in this process")
    asked = parser.parse_args()
    asked.results.mkdir(parents=True, exist_ok=True)
    if asked.apart:
        jax.config.update("jax_num_cpu_devices", 8)
        measure(asked.cases[0], asked.part, asked.results, asked.rounds)
        return
    for part in (asked.part,) if asked.part else ("plan", "time"):
        for name in asked.cases or CASES:
            _apart(name, part, asked)
    files = [asked.results / f"{name}.json" for name in CASES]
    before = asked.page.read_text() if asked.page.exists() else ""
    after = page({file.stem: json.loads(file.read_text()) for file in files if file.exists()}, CASES)
    asked.page.write_text(replace_section(after, "\n".join(page_section(before, TITLE))))


def _apart(name: str, part: str, asked: argparse.Namespace) -> None:
    """One part of a case in a process of its own; how that ended is said."""
    options = ["--apart", "--part", part, "--rounds", str(asked.rounds), "--results", str(asked.results)]
    ended = subprocess.run([sys.executable, "-m", "bench.zoo.run", name, *options]).returncode
    print(f"{name}, {part}: {'ended with ' + str(ended) if ended else 'measured'}", flush=True)


if __name__ == "__main__":
    main()
