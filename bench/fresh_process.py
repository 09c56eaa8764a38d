"""Cases that are measured in a fresh process each, so that none of them finds what another left."""

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterable


def measure_in_processes(
    module: str, doc: str, cases: Iterable[str], measure: Callable[[str], tuple[object, ...]]
) -> list[list[str]]:
    """A row per case; in the process of one case it prints its row and ends.

    Args:
      module: what ``python -m`` runs, the caller.
      doc: its documentation.
      measure: makes the row of a case.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("case", nargs="?", choices=cases, help="one case, in this process")
    case = parser.parse_args().case
    if case:
        print("|".join(map(str, measure(case))))
        sys.exit()
    return [_apart(module, case) for case in cases]


def _apart(module: str, case: str) -> list[str]:
    ran = subprocess.run([sys.executable, "-m", module, case], check=True, capture_output=True, text=True)
    return ran.stdout.strip().splitlines()[-1].split("|")
