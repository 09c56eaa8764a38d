"""Predicts published step times, scores the predictions and writes docs/evidence/predictions.md.

python -m bench.published korthikanti_table5         # these tables only; the page is not written
python -m bench.published --cache predictions.jsonl  # resume from an earlier run
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
    """Predicts and scores the selected tables, or fits the efficiency of matmuls."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="*", choices=[*TABLES, []], help="default: all")
    parser.add_argument("--cache", type=Path, help="file of predictions; rows found there are not planned again")
    parser.add_argument("--page", action="store_true", help="only write the page, from the cached predictions")
    parser.add_argument("--fit", action="store_true", help="only fit the efficiency of matmuls")
    options = parser.parse_args()
    cases = [case for name in options.tables or TABLES for case in TABLES[name]()]
    if options.fit:
        fit(cases)
        return
    known = read_predictions(options.cache)
    chosen = [case for case in cases if case.key in known] if options.page else cases
    scored = list(_scored(chosen, options.cache))
    if not options.tables:
        write_page(scored, [case for case in cases if case not in chosen])


def _scored(cases: Iterable[Case], cache: Path | None) -> Iterator[Scored]:
    """Yields every row with its prediction, and prints it."""
    for case, prediction in predictions(cases, cache):
        half = "fitted" if case.fitted else "scored"
        seconds = f"{case.measured:8.3f} s {prediction.seconds:8.3f} s {error((case, prediction)):+7.1%}"
        times = f"sent {prediction.sent:.2f} s, planned in {prediction.planning:.0f} s"
        print(f"{half} {case.label:64s} {seconds}, {times}", flush=True)
        yield case, prediction


if __name__ == "__main__":
    main()
