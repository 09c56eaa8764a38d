"""Every example that is trained on data reaches what its docstring states.

python -m bench.examples --only vit dlrm

Each is trained by ``meshdsl train`` over data=4,model=2 in a folder of its own, anew.
"""

import argparse
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from bench.report import machine, table
from meshdsl.training.metrics import Record


@dataclass(frozen=True)
class Goal:
    metric: str
    least: float = float("-inf")
    most: float = float("inf")

    def holds(self, found: float) -> bool:
        return self.least <= found <= self.most

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=GOALS, default=list(GOALS))
    rows = [_said(train_example(name)) for name in parser.parse_args().only]
    print(table(("example", "steps", "seconds", "metric", "stated", "found"), rows), f"\n{machine()}")
    sys.exit(any(row[-1].endswith("short of it") for row in rows))


def train_example(name: str) -> tuple[str, ...]:
    """A row of the table: the example trained, and its last evaluation."""
    with tempfile.TemporaryDirectory() as folder:
        begun = perf_counter()
        command = ("-m", "meshdsl", "train", f"examples/{name}.py", "--mesh", "data=4,model=2", "--folder", folder)
        ended = subprocess.run([sys.executable, *command], stdout=sys.stderr).returncode
        seconds = perf_counter() - begun
        if ended:
            return (
                name,
                "",
                f"{seconds:.0f}",
                GOALS[name].metric,
                str(GOALS[name]),
                f"ended with {ended}, short of it",
            )
        steps, metrics = Record(Path(folder) / "metrics.jsonl", sys.maxsize).history.evaluations[-1]
    stated = GOALS[name]
    found = metrics[stated.metric]
    verdict = f"{found:.3f}" + ("" if stated.holds(found) else ", short of it")
    return name, str(steps), f"{seconds:.0f}", stated.metric, str(stated), verdict


def _said(row: tuple[str, ...]) -> tuple[str, ...]:
    """The row, said as soon as it is known."""
    print(*row, file=sys.stderr, flush=True)
    return row


if __name__ == "__main__":
    main()
