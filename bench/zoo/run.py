"""Every case of the zoo: planned, run, compared with the unsharded step and with the XLA partitioner.

python -m bench.zoo.run [case ...]

The partitioner gets the same step between the plan's own input and output layouts. Each case has
a process of its own, because the partitioner ends some of them.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import jax

from bench.peers import partitioned
from bench.report import interleave, machine, ratio, table
from bench.step import sent_bytes, stepper
from bench.zoo.case import Case
from meshdsl.api import Program, Sharded, parallelize
from meshdsl.errors import MeshDSLError
from meshdsl.ir import walk
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.boundary import device_mesh
from meshdsl.lowering.check import check_numbers
from meshdsl.plan.value import Plan
from meshdsl.trace import trace

CASES = {
    "gpt2": "language",
    "bart": "language",
    "mamba2": "language",
    "mixture": "language",
    "recurrent": "language",
    "regnet": "images",
    "convnext": "images",
    "fourier": "images",
    "recommender": "others",
    "equation": "others",
    "graph": "others",
    "inference": "others",
}
HEADER = (
    "case",
    "operations",
    "plan s",
    "gap",
    "worst error",
    "verify",
    "kB sent",
    "kB by XLA",
    "meshdsl / XLA (95%)",
    "XLA's gradients",
)
OURS, XLA = "meshdsl", "XLA partitioner"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="case", help=f"of {', '.join(CASES)}; all by default")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--apart", action="store_true", help="one case, in this process")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    if options.apart:
        measure(options.cases[0], options.rounds)
        return
    rows = [_apart(name, options.rounds) for name in options.cases or CASES]
    print(table(HEADER, rows), f"\n{options.rounds} interleaved steps, mesh data=4,model=2; {machine()}")


def measure(name: str, rounds: int) -> None:
    """Print a row of the table: what is ours first, for the partitioner may end the process."""
    make: Callable[[], Case] = getattr(import_module(f"bench.zoo.{CASES[name]}"), name)
    program, mesh = make().program(), Mesh(data=4, model=2)
    operations = sum(1 for _ in walk(trace(program.step, program.args).graph))
    sharded = parallelize(program.step, mesh, program.layouts, donate_argnums=(0, 1))
    start = time.perf_counter()
    plan = sharded.plan(*program.args)
    seconds = time.perf_counter() - start
    _say(name, operations, f"{seconds:.1f}", f"{plan.gap:.1%}", *_compared(sharded, program))
    ours = sharded.lower(*program.args).compile()
    _say(f"{sent_bytes(ours.as_text(), mesh) / 1e3:.1f}")
    _say(*_against_partitioner(sharded, program, plan, rounds))


def _compared(sharded: Sharded, program: Program) -> tuple[str, str]:
    """The worst error, and whether the compiled program communicates as planned."""
    worst, verified = "wrong", "differs"
    try:
        worst = f"{sharded.check(*program.args).worst:.0e}"
        sharded.verify(*program.args)
        verified = "equal"
    except MeshDSLError as error:
        print(error, file=sys.stderr)
    return worst, verified


def _against_partitioner(sharded: Sharded, program: Program, plan: Plan, rounds: int) -> tuple[str, str, str]:
    """Bytes that the partitioner sends, the ratio of step times, and whether its gradients are right."""
    jitted, shardings = partitioned(program, device_mesh(plan.mesh), plan)
    compiled = jitted.lower(*program.args).compile()
    steps = {OURS: stepper(sharded, program.args), XLA: stepper(compiled, program.args, shardings)}
    seconds = interleave(steps, rounds)
    right = _right(jax.jit(program.step)(*program.args)[-1], stepper(compiled, program.args, shardings)())
    return (
        f"{sent_bytes(compiled.as_text(), plan.mesh) / 1e3:.1f}",
        str(ratio(seconds[OURS], seconds[XLA])),
        "right" if right else "wrong",
    )


def _right(expected: Any, got: Any) -> bool:
    expected, got = jax.tree.leaves(expected), jax.tree.leaves(got)
    try:
        check_numbers(expected, got, [str(i) for i in range(len(got))])
    except MeshDSLError:
        return False
    return True


def _say(*fields: object) -> None:
    print("row", *fields, sep="|", flush=True)


def _apart(name: str, rounds: int) -> list[str]:
    """The row of a case, measured in a process of its own; it says where that ended."""
    command = [sys.executable, "-m", "bench.zoo.run", name, "--apart", "--rounds", str(rounds)]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    said = [line.split("|")[1:] for line in ran.stdout.splitlines() if line.startswith("row|")]
    row = [field for fields in said for field in fields] or [name]
    print(*row, file=sys.stderr)
    return row + ["failed"] * (len(HEADER) - len(row))


if __name__ == "__main__":
    main()
