"""Every schedule over pipes of 2, 4 and 8, with model and data axes besides, on at most 8 devices.

A language model with tied embeddings and dropout, in float64, with NaN wherever nothing was put yet. Every other case
has a balance loss besides, as mixtures of experts have, which is each microbatch's own; those are compared with the
step accumulated by microbatches, the others with the plain step.
"""

import argparse
import random
import re
import time
from dataclasses import dataclass
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np

import meshdsl as md
from meshdsl.pins import make_pins
from meshdsl.trace import trace
from meshdsl.turns import in_turns, lanes, whole_function
from tests.turns.steps import language, language_loss

NAMES = ("1f1b", "gpipe", "interleaved", "zb")
TABLES = ("1f1b", "interleaved", "zb-h1", "zb-v")
SIZES = [(p, m, d) for p, m, d in product((2, 4, 8), (1, 2), (1, 2)) if p * m * d <= 8]


@dataclass(frozen=True)
class Case:
    """One way to run a step; ``microbatches`` may be fewer than stages."""

    schedule: str
    table: bool
    chunks: int
    pipe: int
    model: int
    data: int
    microbatches: int
    recompute: str
    balance: bool

    @property
    def pipeline(self):
        """What is asked for."""
        sizes = self.pipe, self.microbatches, self.chunks
        schedule = md.make_schedule(self.schedule, *sizes) if self.table else self.schedule
        chunks = 1 if self.table else self.chunks
        more = {"recompute": self.recompute, "per_microbatch": self.balance, "batch": "batch/*"}
        return md.Pipeline(self.microbatches, schedule, chunks, **more)


def cases():
    """All that there are; numbers without a schedule are left out."""
    for (p, model, data), recompute, balance in product(SIZES, ("stage", "none"), (False, True)):
        for m in sorted({p - 1, p, 2 * p, 32}):
            for table, names in ((False, NAMES), (True, TABLES)):
                for name, v in product(names, (1, 2, 3)):
                    several = name == "interleaved" or (name == "zb" and not table)
                    if v == 1 or (several and m % p == 0):
                        yield Case(name, table, v, p, model, data, m, recompute, balance)


def run(case, traced):
    """Whether the planned step has the numbers of the reference, the collectives of its plan, and no conditional.

    Args:
      traced: only the numbers, all of the step on one device.
    """
    stages = case.pipe * case.chunks * (2 if case.schedule == "zb-v" else 1)
    args = (*language(batch=2 * case.microbatches, layers=stages, dtype=np.float64), jax.random.key(0))
    layouts = {"params/layers/*": "pipe=S(0)", "params/layers/up": "pipe=S(0) model=S(2)", "batch/*": "data=S(0)"}
    mesh = md.Mesh(pipe=case.pipe, data=case.data, model=case.model)

    def step(params, batch, key):
        return jax.value_and_grad(language_loss)(params, batch, key, balance=0.1 * case.balance)

    if traced:
        got = on_one_device(step, args, case, {"params/layers/*": "pipe=S(0)"})
        compare(got, reference(step, args, case))
        return
    sharded = md.parallelize(step, mesh, layouts, pipeline=case.pipeline)
    compare(sharded(*args), reference(step, args, case))
    sharded.verify(*args)  # which counts its permutes
    assert not re.search(r"stablehlo\.(case|if)\b", sharded.lower(*args).as_text())


def reference(step, args, case):
    """What the plain step comes to, by microbatches where they differ."""
    return on_one_device(step, args, case, {}) if case.balance else step(*args)


def on_one_device(step, args, case, layouts):
    """What the step in microbatches comes to, through stages where layouts split its layers."""
    mesh = md.Mesh(pipe=case.pipe)
    program = in_turns(trace(step, args), case.pipeline, mesh, lambda found: make_pins(found, mesh, layouts))
    return jax.jit(whole_function(program.graph))(*jax.tree.leaves(args))


def compare(got, expected):
    """AssertionError if results differ by more than rounding in float64."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9 * max(1e-6, np.abs(np.asarray(b)).max()))


def nan(shape, dtype):
    """In place of what is there before anything is."""
    return jnp.full(shape, jnp.nan if jnp.issubdtype(dtype, jnp.inexact) else 7, dtype)


def main():
    """Run cases in random order, and say which fail."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--limit", type=int, help="cases at most")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--traced", action="store_true", help="only the numbers, on one device, without planning")
    asked = options.parse_args()
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_disable_most_optimizations", True)  # nearly all of the time is XLA's
    lanes.unused = nan
    found = list(cases())
    random.Random(asked.seed).shuffle(found)
    failed = 0
    for number, case in enumerate(found[: asked.limit], 1):
        start, said = time.time(), "ok"
        try:
            run(case, asked.traced)
        except (AssertionError, md.MeshDSLError) as error:
            failed, said = failed + 1, f"FAILED: {str(error)[:300]}"
        print(f"{number}/{len(found)} {case} {time.time() - start:.0f} s {said}", flush=True)
    print(f"{failed} failed")
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
