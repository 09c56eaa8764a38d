"""Plans, checks and trains public programs from your own checkouts, and writes docs/evidence/programs.md.

python -m bench.programs [name ...] --checkouts FOLDER

Each part of a program runs in a process of its own. Results are cached in .cache/programs; a program whose checkout is
absent keeps its results, if it has any.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import jax

from bench.programs import REGISTRY, adapters
from bench.programs.adapter import Adapter, commit_of
from bench.programs.measure import PARTS, measure
from bench.programs.page import page


def main() -> None:
    """Measures the selected programs and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(REGISTRY)}; all by default")
    parser.add_argument("--checkouts", type=Path, help="the folder of checkouts, each as name or owner+name")
    parser.add_argument("--part", choices=PARTS, help="only numbers at small size, or only bytes at the published one")
    parser.add_argument("--results", type=Path, default=Path(".cache/programs"), help="folder of cached results")
    parser.add_argument("--page", type=Path, default=Path("docs/evidence/programs.md"))
    parser.add_argument("--in-process", action="store_true", help="measure one part of one program in this process")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in REGISTRY]
    if unknown:
        parser.error(f"no program {unknown[0]!r}; known: {', '.join(REGISTRY)}")
    known = adapters()
    names = options.names or list(REGISTRY)
    if options.checkouts is None:
        print(wanted({name: known[name] for name in names}))
        return
    if options.in_process:
        jax.config.update("jax_num_cpu_devices", 8)
        adapter = known[names[0]]
        measure(adapter, options.part, adapter.checkout(options.checkouts), options.results / f"{names[0]}.json")
        return
    options.results.mkdir(parents=True, exist_ok=True)
    for name in names:
        checkout = known[name].checkout(options.checkouts)
        if checkout is None:
            print(f"{name}: no checkout in {options.checkouts}; {wanted({name: known[name]})}", flush=True)
            continue
        commit = commit_of(checkout)
        if commit not in (None, known[name].commit):
            print(f"{name}: {checkout} is at {commit}; its adapter was written for {known[name].commit}", flush=True)
        for part in (options.part,) if options.part else PARTS:
            _in_new_process(name, part, options)
    files = {name: options.results / f"{name}.json" for name in REGISTRY}
    found = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
    options.page.write_text(page(known, found))


def wanted(programs: Mapping[str, Adapter]) -> str:
    """Returns which repositories are needed, in one line."""
    commits = dict.fromkeys(f"github.com/{each.repository} at {each.commit[:12]}" for each in programs.values())
    return f"to run public training programs, state CHECKOUTS=folder (--checkouts) with {', '.join(commits)}"


def _in_new_process(name: str, part: str, options: argparse.Namespace) -> None:
    """Measures one part of a program in a process of its own and prints how it ended."""
    folders = ["--checkouts", str(options.checkouts), "--results", str(options.results)]
    command = [sys.executable, "-m", "bench.programs", name, "--in-process", "--part", part, *folders]
    status = subprocess.run(command).returncode
    print(f"{name}, {part}: {f'exit status {status}' if status else 'measured'}", flush=True)


if __name__ == "__main__":
    main()
