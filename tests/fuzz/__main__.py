"""Many random cases; each failure is printed as the smallest program that fails likewise.

A run that ends its process, or stands still, as XLA's CPU runtime now and then makes one, has failed; the others go on.

JAX_NUM_CPU_DEVICES=8 python -m tests.fuzz --cases 1000 --seed 7
"""

import argparse
import secrets
import sys
import time

from tests.fuzz.tally import Tally
from tests.fuzz.worker import Worker


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000, help="when to stop; a run is always finished")
    parser.add_argument("--seed", type=int, help="of the first run; drawn and printed by default")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds to look for a smaller failing case")
    asked = parser.parse_args()
    seed = secrets.randbelow(2**31) if asked.seed is None else asked.seed
    failed = _fuzz(asked.cases, seed, asked.patience)
    sys.exit(len(failed) > 0)


def _fuzz(cases: int, seed: int, patience: float) -> list[int]:
    """Judges so many cases, in runs of consecutive seeds; returns the seeds that failed."""
    tally, failed, start, worker = Tally(), [], time.time(), Worker(patience)
    while tally.cases < cases:
        found, error = worker.run(seed)
        tally.add(found)
        if error:
            failed.append(seed)
            print(f"seed {seed} fails: {error}\n", flush=True)
        for text in found.above:
            print(f"seed {seed}, not the cheapest plan: {text}\n", flush=True)
        print(f"seed {seed}: {tally}, {len(failed)} runs failed, {time.time() - start:.0f} s", flush=True)
        seed += 1
    worker.end()
    print(f"\n{tally.table()}\n{tally}, {len(failed)} runs failed", *map(_again, failed), sep="\n")
    return failed


def _again(seed: int) -> str:
    return f"make fuzz SEED={seed} FUZZ=1  # runs it again"


if __name__ == "__main__":
    main()
