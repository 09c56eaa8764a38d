"""The demo: measure the machine, plan a step, check the plan, train, and show the result.

    python -m meshdsl.training.demo examples/gpt.py --mesh data=4,model=2

The file defines ``program`` (an ``md.Program`` with init, batches and evaluate) and ``predict(params, tokens) ->
logits``. All files of the run are in one folder. Started again after an interruption, even ``kill -9``, the demo
resumes from the last checkpoint. The measured topology is saved too, since an exact continuation needs the same plan.
"""

import argparse
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from meshdsl.api import Program, Sharded
from meshdsl.api.program import parallelize_program
from meshdsl.calibrate import calibrate
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.topology import Topology, load_topology, save_topology, topology_text
from meshdsl.training.datasets.text import load, unigram_entropy
from meshdsl.training.evaluate import sample_text
from meshdsl.training.loop import Run
from meshdsl.training.observing.metrics import History, draw_curves
from meshdsl.training.run import check_trainable, required, steps_of, train_program

PROMPT = "ROMEO.\n"
console = Console(highlight=False)


def main() -> None:
    """Runs the command."""
    options = _parser().parse_args()
    jax.config.update("jax_num_cpu_devices", options.mesh.size)
    text = load()
    file = runpy.run_path(str(options.file))
    program: Program = file["program"]
    check_trainable(program)
    run = Run(options.steps or steps_of(program), options.folder)

    sharded = plan_program(program, Mesh(topology=measure(options.mesh, run.folder), **dict(options.mesh)), run.folder)
    console.rule(f"train {run.steps} steps, checkpoints in {run.folder}")
    state, outcome = train_program(sharded, program, run)
    if outcome.stopped:
        raise SystemExit(128 + outcome.stopped)

    unigram = unigram_entropy(text.held_out, text.held_out)
    report(outcome.history, unigram, run.folder)
    show_sample(file["predict"], state[0], program.args[-1]["inputs"].shape[1])


def measure(mesh: Mesh, folder: Path) -> Topology:
    """The topology measured by this run, now or before an interruption."""
    saved = folder / "topology.toml"
    if not saved.exists():
        folder.mkdir(parents=True, exist_ok=True)
        save_topology(calibrate(mesh), saved)
    console.rule(f"costs of {mesh} on this machine")
    console.print(topology_text(load_topology(saved)), markup=False)
    return load_topology(saved)


def plan_program(program: Program, mesh: Mesh, folder: Path) -> Sharded[..., Any]:
    """Plans the step, prints the plan, and compares numbers and collectives with it on this machine."""
    sharded = parallelize_program(program, mesh)
    plan = sharded.plan(*program.args)
    plan.save(folder / "plan.json")
    console.rule("plan")
    console.print(str(plan), markup=False, soft_wrap=True)
    console.rule("check: sharded numbers equal the unsharded step's")
    console.print(str(sharded.check(*required(program.init)(), next(iter(required(program.batches)())))), markup=False)
    console.rule("verify: compiled collectives equal the planned ones")
    console.print(str(sharded.verify(*program.args)), markup=False)
    return sharded


def report(history: History, unigram: float, folder: Path) -> None:
    """Prints how far below the unigram entropy the held-out loss ends, and draws the losses."""
    loss = history.evaluations[-1][1]["held-out loss"]
    picture = draw_curves(history, folder / "curves.png", {"unigram entropy": unigram})
    console.rule("result")
    console.print(
        f"held-out loss {loss:.3f} nats per token, unigram entropy {unigram:.3f}: "
        f"{unigram - loss:.3f} below\nloss curve: {picture}"
    )


def show_sample(predict: Callable[..., Any], params: Any, window: int) -> None:
    """Prints a sample of the trained model, computed on one device."""
    on_one_device = jax.device_put(jax.device_get(params), jax.devices()[0])
    console.rule("sample")
    console.print(sample_text(predict, on_one_device, load().tokenizer, PROMPT, window=window), markup=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Plan, check and train a program file, and show the result.")
    parser.add_argument("file", type=Path, help="defines program and predict")
    parser.add_argument("--mesh", type=Mesh.parse, default="data=4,model=2", help="default: %(default)s")
    parser.add_argument("--steps", type=int, help="default: those of the program")
    parser.add_argument("--folder", type=Path, default=Path("runs/demo"), help="default: %(default)s")
    return parser


if __name__ == "__main__":
    main()
