"""Step time of the planned program on one device, against plain jax.jit.

python -m bench.single --rounds 30
"""

import argparse

import jax

from bench.example_steps import load_example, random_batch
from bench.report import interleave, machine, ratio, table
from bench.step import stepper
from meshdsl.api import parallelize
from meshdsl.layouts.mesh import Mesh


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    program = load_example("gpt").program
    sharded = parallelize(program.step, Mesh(data=1, model=1), program.layouts, donate_argnums=(0, 1))
    plan = sharded.plan(*program.args)
    plain = jax.jit(program.step, donate_argnums=(0, 1))
    args = (*program.init(), random_batch(program))
    seconds = interleave({"meshdsl": stepper(sharded, args), "jax.jit": stepper(plain, args)}, options.rounds)
    measured = ratio(seconds["meshdsl"], seconds["jax.jit"])
    rows = [(len(plan.collectives), str(measured))]
    print(table(("collectives", "meshdsl / jax.jit (95%)"), rows), f"\n{options.rounds} interleaved steps; {machine()}")


if __name__ == "__main__":
    main()
