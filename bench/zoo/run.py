"""Plans and runs every case of the zoo; compares it with the unsharded step and with the XLA partitioner.

python -m bench.zoo.run [case ...]

The partitioner compiles the same step at the plan's input and output layouts, and again with only the batch sharded.
Each case runs in a process of its own, because the partitioner crashes on some. Results are cached in .cache/zoo and
written to docs/evidence/zoo.md; the page's section of gaps (``bench.zoo.gaps``) is preserved.
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
    """Measures the selected cases and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="case", help=f"of {', '.join(CASES)}; all by default")
    parser.add_argument("--part", choices=["plan", "time"], help="only plans and bytes, or only step times")
    parser.add_argument("--rounds", type=int, default=20, help="timed steps per program")
    parser.add_argument("--results", type=Path, default=Path(".cache/zoo"), help="folder of cached results")
    parser.add_argument("--page", type=Path, default=Path("docs/evidence/zoo.md"))
    parser.add_argument("--in-process", action="store_true", help="measure one part of one case in this process")
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    if options.in_process:
        jax.config.update("jax_num_cpu_devices", 8)
        measure(options.cases[0], options.part, options.results, options.rounds)
        return
    for part in (options.part,) if options.part else ("plan", "time"):
        for name in options.cases or CASES:
            _in_new_process(name, part, options)
    files = [options.results / f"{name}.json" for name in CASES]
    before = options.page.read_text() if options.page.exists() else ""
    after = page({file.stem: json.loads(file.read_text()) for file in files if file.exists()}, CASES)
    options.page.write_text(replace_section(after, "\n".join(page_section(before, TITLE))))


def _in_new_process(name: str, part: str, options: argparse.Namespace) -> None:
    """Measures one part of a case in a process of its own and prints how it ended."""
    arguments = ["--in-process", "--part", part, "--rounds", str(options.rounds), "--results", str(options.results)]
    status = subprocess.run([sys.executable, "-m", "bench.zoo.run", name, *arguments]).returncode
    print(f"{name}, {part}: {f'exit status {status}' if status else 'measured'}", flush=True)


if __name__ == "__main__":
    main()
