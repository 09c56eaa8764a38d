"""Checks that every example trained on data reaches the metric that its docstring promises.

python -m bench.examples --only vit dlrm

``meshdsl train`` trains each from scratch on ``data=4,model=2``, in a temporary folder. The exit status is 1 if an
example misses its goal.
"""

import argparse
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from bench.report import machine, table
from meshdsl.training.observing.metrics import MetricsFile


@dataclass(frozen=True)
class Goal:
    """The range in which a metric of the last evaluation has to lie."""

    metric: str
    least: float = float("-inf")
    most: float = float("inf")

    def met(self, value: float) -> bool:
        """Whether ``value`` is in the range."""
        return self.least <= value <= self.most

    def __str__(self) -> str:
        return f">= {self.least}" if self.most == float("inf") else f"<= {self.most}"


GOALS = {
    "digits": Goal("accuracy", least=0.95),
    "gpt": Goal("held-out loss", most=4.95),
    "vit": Goal("accuracy", least=0.875),
    "dlrm": Goal("AUC", least=0.695),
    "movies": Goal("AUC", least=0.765),
    "moe": Goal("held-out loss", most=4.35),
}


MISSED = "goal missed"


def main() -> None:
    """Trains the examples and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=GOALS, default=list(GOALS))
    rows = []
    for name in parser.parse_args().only:
        rows.append(train_example(name))
        print(*rows[-1], file=sys.stderr, flush=True)
    print(table(("example", "steps", "seconds", "metric", "goal", "reached"), rows), f"\n{machine()}")
    sys.exit(any(row[-1].endswith(MISSED) for row in rows))


def train_example(name: str) -> tuple[str, ...]:
    """Trains an example and returns its table row, with the last evaluation."""
    goal = GOALS[name]
    with tempfile.TemporaryDirectory() as folder:
        start = perf_counter()
        command = ("-m", "meshdsl", "train", f"examples/{name}.py", "--mesh", "data=4,model=2", "--folder", folder)
        status = subprocess.run([sys.executable, *command], stdout=sys.stderr).returncode
        seconds = perf_counter() - start
        if status:
            return name, "", f"{seconds:.0f}", goal.metric, str(goal), f"exit status {status}, {MISSED}"
        steps, metrics = MetricsFile(Path(folder) / "metrics.jsonl", sys.maxsize).history.evaluations[-1]
    value = metrics[goal.metric]
    reached = f"{value:.3f}" + ("" if goal.met(value) else f", {MISSED}")
    return name, str(steps), f"{seconds:.0f}", goal.metric, str(goal), reached


if __name__ == "__main__":
    main()
