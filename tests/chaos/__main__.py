"""Random kills, stops and hangs over supervised runs of 2 to 4 processes; each has to end as if undisturbed.

python -m tests.chaos --faults 100 --seed 0
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from meshdsl.training.observing.events import downtimes, read_events
from tests.chaos.run import FAULTS, Disturbed, Wrong, disturb, undisturbed

PER_RUN, STEPS = 8, 160  # faults and steps of a run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, nargs="*", default=[2, 3, 4], help="numbers to draw from")
    parser.add_argument("--kinds", nargs="*", choices=FAULTS, default=list(FAULTS), help="faults to draw from")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        wrong = soak(Path(place), asked.faults, random.Random(asked.seed), asked.processes, asked.kinds)
    sys.exit(bool(wrong))


def soak(place: Path, faults: int, rng: random.Random, processes: list[int], kinds: list[str]) -> list[str]:
    """So many faults; returns what went wrong, and prints it and a table of downtimes."""
    expected = {count: undisturbed(place / f"undisturbed-{count}", count, STEPS) for count in processes}
    downtime, lost, stages = defaultdict(list), defaultdict(list), defaultdict(list)
    wrong, done, number = [], 0, 0
    while done < faults:
        number, count, start = number + 1, rng.choice(processes), time.monotonic()
        run, hit = Disturbed(place / f"run-{number}", count, STEPS, rng), []
        try:
            for _ in range(min(PER_RUN, faults - done)):
                hit.append(rng.choice(kinds))
                done += 1
                seconds, steps = disturb(run, hit[-1])
                downtime[hit[-1]].append(seconds)
                lost[hit[-1]].append(steps)
            if status := run.end():
                raise Wrong(f"it ended with status {status}\n{run.said()}")
            difference, verdict = run.judge(expected), "as undisturbed"
            verdict += f" (meshes of {sorted(run.meshes)} devices, {difference:.1e})" if len(run.meshes) > 1 else ""
        except Wrong as error:
            verdict = f"WRONG: {error}"
            wrong.append(verdict)
        finally:
            run.clear()
        for each in downtimes(read_events(run.folder)):
            for stage, seconds in each.stages.items():
                stages[stage].append(seconds)
        seconds = time.monotonic() - start
        print(f"run {number}, {count} processes, {seconds:.0f} s: {', '.join(hit)}: {verdict}", flush=True)
    print(f"\n{'fault':20} {'times':>5} {'median s':>9} {'longest s':>9} {'most steps lost':>16}")
    for name, seconds in downtime.items():
        print(f"{name:20} {_figures(seconds)} {max(lost[name]):16}")
    print(f"\n{'stage of a downtime':20} {'times':>5} {'median s':>9} {'longest s':>9}")
    for name, seconds in stages.items():
        print(f"{name:20} {_figures(seconds)}")
    print(f"\n{done} faults, {number} runs, {len(wrong)} wrong")
    return wrong


def _figures(seconds: list[float]) -> str:
    return f"{len(seconds):5} {statistics.median(seconds):9.1f} {max(seconds):9.1f}"


if __name__ == "__main__":
    main()
