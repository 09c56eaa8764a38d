"""Optimality gaps of the zoo's plans on one, two and three mesh axes.

python -m bench.zoo.gaps [case ...]

Steps are planned but not run. Results are cached in .cache/zoo-gaps and written to a section of docs/evidence/zoo.md.
"""

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from bench.planner.cases import MESHES
from bench.planner.cases import TOPOLOGY as NODE
from bench.report import page_section, table, versions
from bench.zoo.measure import CASES, build_case, on_mesh
from meshdsl.layouts.mesh import Mesh
from meshdsl.util.text import percent_text, seconds_text

Row = Mapping[str, Any]
CACHE, PAGE = Path(".cache/zoo-gaps"), Path("docs/evidence/zoo.md")
TITLE = """
## Gaps

The part of a step's predicted time that is not proved necessary (`plan.gap`, see [planner](planner.md)), on the
topology of the table above and on a DGX H100. The batch is split over `data`, everything else left open. Planning
seconds are processor seconds, with tracing. The jaxpr of inference differs from process to process (its library sums
in the order of a set), and so do its plans.
"""
NEXT = "## Fallbacks\n"  # the next section of the page


def main() -> None:
    """Measures the selected cases and writes the section."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="case", help=f"of {', '.join(CASES)}; all by default")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    CACHE.mkdir(parents=True, exist_ok=True)
    for name in options.cases or CASES:
        rows = []
        for row in gaps(name):
            print(row, flush=True)
            rows.append(row)
        (CACHE / f"{name}.json").write_text(json.dumps(rows))
    files = [CACHE / f"{name}.json" for name in CASES]
    rows = [row for file in files if file.exists() for row in json.loads(file.read_text())]
    PAGE.write_text(replace_section(PAGE.read_text(), _section(rows)))


def gaps(name: str) -> Iterator[Row]:
    """Plans a case on every topology and mesh."""
    program = build_case(name).program()
    for topology in (Mesh(data=8).topology.name, NODE):
        for axes in MESHES:
            start = time.process_time()
            plan = on_mesh(program, Mesh.parse(axes, topology)).plan(*program.args)
            took = time.process_time() - start
            facts = {"cost": plan.seconds, "gap": plan.gap, "seconds": took}
            yield {"name": name, "topology": topology, "mesh": axes, **facts}


def replace_section(page: str, section: str) -> str:
    """Returns the page with its section of gaps replaced, or inserted."""
    before = "\n".join(page_section(page, TITLE)).strip()
    rest = page.replace(f"{before}\n\n", "") if before else page
    return rest.replace(NEXT, f"{section.strip()}\n\n{NEXT}")


def _section(rows: Sequence[Row]) -> str:
    header = ("case", "topology", "mesh", "predicted step", "gap", "seconds")
    proved, largest = sum(row["gap"] == 0 for row in rows), max(row["gap"] for row in rows)
    summary = f"Proved optimal: {proved} of {len(rows)}; the largest gap is {percent_text(largest)}."
    machine = f"2 x86-64 cores, busy with other programs; {versions()}"
    return "\n".join([TITLE, table(header, [_row(row) for row in rows]), "", summary, "", machine])


def _row(row: Row) -> tuple[str, ...]:
    facts = seconds_text(row["cost"]), percent_text(row["gap"]), f"{row['seconds']:.1f}"
    return row["name"], row["topology"], row["mesh"], *facts


if __name__ == "__main__":
    main()
