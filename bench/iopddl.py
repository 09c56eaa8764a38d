"""Solve an instance of the ASPLOS / EuroSys 2025 contest on intra-operator parallelism, and report cost and bound.

python bench/iopddl.py FILE.json.gz --seconds 60

The time limit counts from process start and includes reading the file. The last line reports cost and peak memory of
the choice, both computed from the file in exact integers, and a lower bound on the cost of any feasible choice.
"""

import argparse
import sys
import time
from pathlib import Path

STARTED = time.perf_counter()
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout without installation


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    from meshdsl.errors import MeshDSLError
    from meshdsl.plan import load_instance, solve

    try:
        instance = load_instance(asked.file)
        answer = solve(instance, asked.seconds - (time.perf_counter() - STARTED), asked.seed)
    except (MeshDSLError, OSError) as error:
        print(f"no feasible choice: {error}", file=sys.stderr)
        return 1
    score = instance.score(answer.choice)
    seconds = time.perf_counter() - STARTED
    print(f"cost={score.cost} peak={score.peak} limit={score.limit} bound={answer.bound} seconds={seconds:.1f}")
    return 0 if score.fits else 1


if __name__ == "__main__":
    sys.exit(main())
