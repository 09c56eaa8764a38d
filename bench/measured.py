"""Measured against predicted step times on this machine: docs/evidence/measured.md and docs/evidence/measured.svg.

python -m bench.measured [--steps 20] [--cases gpt 'zoo, bart' ...] [--layouts gpt mlp]

The machine is calibrated first (8 virtual CPU devices, ``data=4,model=2``); each case is then planned with that
topology alone and run. Cases are the models of ``models/`` at the sizes of ``bench/memory.py`` and, if their libraries
are installed, those of the zoo. ``--layouts`` ranks five strategies of one model. Results are cached in
.cache/measured, one file per case; ``--again`` discards them. The machine should be otherwise idle.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from itertools import combinations
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bench.example_steps import random_array
from bench.memory import FAMILIES
from bench.published.plot import Point, points
from bench.report import machine, summarised, table
from bench.step import stepper
from bench.zoo.measure import CASES
from meshdsl.api import Program, parallelize
from meshdsl.calibrate import calibrate
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.topology import load_topology, save_topology
from meshdsl.models import gpt, mixture
from meshdsl.util.text import percent_text, seconds_text

ROOT = Path(__file__).parent.parent
PAGE, PICTURE = ROOT / "docs" / "evidence" / "measured.md", ROOT / "docs" / "evidence" / "measured.svg"
CACHE = ROOT / ".cache" / "measured"
SHAPE = Mesh(data=4, model=2)
LAYOUTS = {
    "gpt": ("data", "tensor", "fsdp", "zero", "sequence"),
    "mixture": ("data", "tensor", "fsdp", "zero", "expert"),
}
# Few tokens and many parameters, so that layouts differ in communication.
RANKED: dict[str, tuple[Any, Callable[[Any], Program]]] = {
    "gpt": (gpt, lambda rules: gpt.program(gpt.Config(2, 256, 4, seq=32, vocab=4096), rules, batch=8)),
    "mixture": (
        mixture,
        lambda rules: mixture.program(
            mixture.Config(*(2, 128, 512, 4, 2, 32, 32, 2048), experts=8, choices=2, group=32), rules, batch=8
        ),
    ),
}
ZOO = {f"zoo, {name}": name for name in CASES}
Facts = dict[str, Any]


def main() -> None:
    """Measures the selected cases and writes page and picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="timed steps per case")
    parser.add_argument(
        "--cases", nargs="*", choices=[*FAMILIES, *ZOO], default=[*FAMILIES, *ZOO], help="models, and cases of the zoo"
    )
    parser.add_argument(
        "--layouts", nargs="*", default=list(LAYOUTS), choices=LAYOUTS, help="models whose layouts are ranked"
    )
    parser.add_argument("--again", action="store_true", help="discard earlier measurements")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", SHAPE.size)
    CACHE.mkdir(parents=True, exist_ok=True)
    for file in CACHE.iterdir() if options.again else ():
        file.unlink()
    mesh = _calibrated()
    for name, make in _programs(options.cases, options.layouts):
        _measure(name, make, mesh, options.steps)
    found = [json.loads(file.read_text()) for file in sorted(CACHE.glob("*.json"))]
    PICTURE.write_text(picture(found))
    PAGE.write_text(page(found))


def _calibrated() -> Mesh:
    file = CACHE / "topology.toml"
    if not file.exists():
        save_topology(calibrate(SHAPE), file)
    return Mesh(topology=load_topology(file), **dict(SHAPE))


def _programs(cases: Sequence[str], layouts: Sequence[str]) -> Iterator[tuple[str, Callable[[], Program]]]:
    """Yields the selected programs by name: ``gpt`` has only the batch pinned, ``gpt, fsdp`` a strategy's rules."""
    for name in cases:
        if name in ZOO:
            yield name, lambda name=name: _zoo(ZOO[name])
        else:
            yield name, lambda name=name: _family(name, "data")
    for name in layouts:
        for strategy in LAYOUTS[name]:
            yield f"{name}, {strategy}", lambda name=name, strategy=strategy: _family(name, strategy, RANKED)


def _family(name: str, strategy: str, sizes: Any = FAMILIES) -> Program:
    module, program = sizes[name]
    return program(module.RULES[strategy])


def _zoo(name: str) -> Program:
    return getattr(import_module(f"bench.zoo.{CASES[name]}"), name)().program()


def _measure(name: str, make: Callable[[], Program], mesh: Mesh, steps: int) -> None:
    file = CACHE / f"{name}.json"
    if file.exists():
        return
    try:
        found = time_step(make(), mesh, steps)
    except ModuleNotFoundError as error:
        print(f"{name}: skipped, {error}")
        return
    file.write_text(json.dumps({"name": name, **found, "machine": machine()}, indent=1))
    jax.clear_caches()
    print(f"{name}: {seconds_text(found['measured'])}, predicted {seconds_text(found['predicted'])}", flush=True)


def time_step(program: Program, mesh: Mesh, steps: int) -> Facts:
    """Plans and runs a program; returns median and predicted seconds per step, and the machine's load average."""
    sharded = parallelize(program.step, mesh, program.layouts, rules=program.rules, donate_argnums=(0, 1))
    plan = sharded.plan(*program.args)
    args = jax.tree.map(random_array, program.args)
    step = stepper(sharded, args, sharded.input_shardings(*args)[0])
    jax.block_until_ready(step())
    seconds = [_timed(step) for _ in range(steps)]
    return {
        "measured": statistics.median(seconds),
        "fastest": min(seconds),
        "predicted": plan.seconds,
        "simulated": plan.simulated_seconds,
        "sent": sum(c.seconds * c.trips for c in plan.collectives),
        "gap": plan.gap,
        "steps": steps,
        "load": os.getloadavg()[0],
    }


def _timed(step: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(step())
    return time.perf_counter() - start


def kendall(found: Sequence[Facts]) -> tuple[int, int]:
    """Returns concordant and discordant pairs; pairs measured within 2% of each other are ties and do not count."""
    pairs = [(a, b) for a, b in combinations(found, 2) if abs(a["measured"] / b["measured"] - 1) > 0.02]
    right = sum((a["predicted"] < b["predicted"]) == (a["measured"] < b["measured"]) for a, b in pairs)
    return right, len(pairs) - right


def page(found: Sequence[Facts]) -> str:
    """Returns the text of docs/evidence/measured.md."""
    parts = [
        INTRODUCTION,
        _table(found),
        _scores(found),
        CAUSES,
        "![predicted against measured](measured.svg)",
        _ranking(found),
    ]
    made = sorted({fact["machine"] for fact in found})
    loads = [fact["load"] for fact in found]
    busy = f"load of the machine while it was measured: {min(loads):.1f} to {max(loads):.1f}" if loads else ""
    text = "\n\n".join([*parts, f"`python -m bench.measured`, {'; '.join(made)}; {busy}"]) + "\n"
    ranks = [kendall([fact for fact in found if _ranked(fact["name"]) == name]) for name in LAYOUTS]
    right, wrong = (sum(each) for each in zip(*ranks, strict=True))
    return summarised(
        text,
        f"Step times predicted after `calibrate`, and measured on 8 virtual CPU devices. {_off(found)}",
        f"Of the pairs of layouts of one model, {right} are ranked as measured, {wrong} the other way round.",
    )


def _table(found: Sequence[Facts]) -> str:
    header = ("case", "measured", "fastest", "predicted", "error", "of that sent", "with overlap", "gap")
    names = ("measured", "fastest", "predicted", "sent", "simulated")
    rows = []
    for fact in found:
        measured, fastest, predicted, sent, simulated = (seconds_text(fact[name]) for name in names)
        off = f"{fact['predicted'] / fact['measured'] - 1:+.0%}"
        rows.append((fact["name"], measured, fastest, predicted, off, sent, simulated, percent_text(fact["gap"])))
    return table(header, rows)


def _scores(found: Sequence[Facts]) -> str:
    zoo = [fact for fact in found if fact["name"] in ZOO]
    return f"All {_off(found)} The zoo's {_off(zoo) if zoo else 'were not measured.'} We aimed at 25% in the median."


def _off(found: Sequence[Facts]) -> str:
    off = np.abs([fact["predicted"] / fact["measured"] - 1 for fact in found])
    return f"{len(off)} steps: {np.median(off):.0%} off in the median, nine in ten below {np.percentile(off, 90):.0%}."


def _ranking(found: Sequence[Facts]) -> str:
    groups = {name: [fact for fact in found if _ranked(fact["name"]) == name] for name in LAYOUTS}
    rows = [(name, len(facts), *kendall(facts)) for name, facts in groups.items() if facts]
    made = [(*row, f"{(row[2] - row[3]) / max(1, row[2] + row[3]):.2f}") for row in rows]
    return f"## Ranking\n\n{table(('model', 'layouts', 'pairs ranked right', 'wrong', 'Kendall tau'), made)}"


def _ranked(name: str) -> str:
    """Returns the model whose layouts a case ranks, or ''; ``gpt, remat`` is a model of its own."""
    model, _, strategy = name.rpartition(", ")
    return model if strategy in LAYOUTS.get(model, ()) else ""


def picture(found: Sequence[Facts]) -> str:
    """Returns the SVG of predicted against measured seconds."""
    kinds = ["models", "layouts of one model", "zoo"]

    def kind(name: str) -> int:
        return 2 if name.startswith("zoo") else 1 if _ranked(name) else 0

    circles = [Point(fact["measured"], fact["predicted"], kind(fact["name"]), True, fact["name"]) for fact in found]
    return points(circles, kinds, band=0.25)


INTRODUCTION = """# Step times measured here

Models on 8 virtual CPU devices, planned with the topology that `meshdsl topology calibrate` measured just before;
nothing else is fitted. "Predicted" is `plan.seconds`, sequential execution, as these devices share the cores of one
machine; "with overlap" is `plan.simulated_seconds`. A case with a strategy after its name is pinned by that strategy's
rules; the others, and those of the zoo, by their batch alone. Layouts are ranked at other sizes, with few tokens and
many parameters, so that they differ in communication."""

CAUSES = """The largest errors and their known causes:

* `zoo, equation`: the number of iterations of a `while` loop depends on data, and the plan estimates it.
* `resnet`: gradients of convolutions in a scan run at 2 GFLOP/s in XLA's CPU compiler (jax 0.10.2), those of the same
  layers unrolled at 66 (a 3x3 convolution of 64 channels, four layers, one device); calibration measures matmuls.
* `gpt, remat`: the plan counts recomputation; the CPU compiler drops the barriers that would keep it from reading the
  stored activations instead.
* `zoo, convnext` and others with images or FFTs: grouped convolutions and FFTs have no measured rate of their own. Not
  investigated further."""

if __name__ == "__main__":
    main()
