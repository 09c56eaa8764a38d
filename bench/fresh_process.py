"""Measures each case in a fresh process, so that no case profits from the caches of an earlier one."""

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterable


def measure_in_processes(
    module: str, doc: str, cases: Iterable[str], measure: Callable[[str], tuple[object, ...]]
) -> list[list[str]]:
    """Returns one table row per case.

    The calling module is started again for every case, with the case as its argument; in that process this function
    prints the row and exits.

    Args:
      module: the calling module, as ``python -m`` takes it.
      doc: its docstring, whose first line describes the command.
      cases: names of the cases.
      measure: returns the row of a case.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("case", nargs="?", choices=cases, help="measure one case in this process")
    case = parser.parse_args().case
    if case:
        print("|".join(map(str, measure(case))))
        sys.exit()
    rows = []
    for case in cases:
        ran = subprocess.run([sys.executable, "-m", module, case], check=True, capture_output=True, text=True)
        rows.append(ran.stdout.strip().splitlines()[-1].split("|"))
    return rows
