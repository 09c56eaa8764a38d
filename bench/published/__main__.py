"""Predict published step times; ``python -m bench.published`` scores all tables and writes docs/predictions.md.

python -m bench.published korthikanti_table5        # these tables only, and no page
python -m bench.published --kept predictions.jsonl  # go on where an earlier run ended
"""

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path

from bench.published import dgxc, maxtext, megatron, mosaic
from bench.published.case import Case
from bench.published.fit import fit
from bench.published.page import write_page
from bench.published.predict import predictions, read_predictions
from bench.published.score import Scored, error

TABLES = {
    "megatron_sc21_table1": megatron.sc21,
    "korthikanti_table5": megatron.korthikanti,
    "megatron_h100_weak_2024": megatron.h100_weak,
    "mosaic_mpt": mosaic.cases,
    "dgxc_benchmarking": dgxc.cases,
    "maxtext_tpu_readme": maxtext.cases,
}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="*", choices=[*TABLES, []], help="default is all")
    parser.add_argument("--kept", type=Path, help="file of predictions: those in it are not made again")
    parser.add_argument("--page", action="store_true", help="write the page from what is kept, and predict nothing")
    parser.add_argument("--fit", action="store_true", help="fit the efficiency of products, and score nothing")
    asked = parser.parse_args()
    if asked.fit:
        fit(case for name in asked.tables or TABLES for case in TABLES[name]())
        return
    cases = [case for name in asked.tables or TABLES for case in TABLES[name]()]
    known = read_predictions(asked.kept)
    chosen = [case for case in cases if case.key in known] if asked.page else cases
    scored = list(_scored(chosen, asked.kept))
    if not asked.tables:
        write_page(scored, [case for case in cases if case not in chosen])


def _scored(cases: Iterable[Case], kept: Path | None) -> Iterator[Scored]:
    """Every row with its prediction, printed as it comes."""
    for case, found in predictions(cases, kept):
        half = "fitted" if case.fitted else "scored"
        figures = f"{case.measured:8.3f} s {found.seconds:8.3f} s {error((case, found)):+7.1%}, sent {found.sent:.2f} s"
        print(f"{half} {case.label:64s} {figures}, planned in {found.planning:.0f} s", flush=True)
        yield case, found


if __name__ == "__main__":
    main()
