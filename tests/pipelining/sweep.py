"""Every schedule over pipes of 2, 4 and 8, with model and data axes besides, on at most 8 devices.

Tokens through layers with tied embeddings and dropout, in float64, with NaN wherever nothing was put yet. Every other
case has a balance loss besides, as mixtures of experts have, which is each microbatch's own. Those are compared with
the step accumulated by microbatches, the others with the plain step: loss, gradients and updated parameters.

Nearly all of the time is planning and XLA's, so the model is small, and what cases are compared with is worked out once
for all that have as many layers and microbatches.
"""

import argparse
import random
import re
import time
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import meshdsl as md
from meshdsl.pins import UserPins
from meshdsl.pipelining import stage_buffers, to_microbatches, whole_function
from meshdsl.trace import trace
from tests.quick_compiles import compile_quickly

NAMES = ("1f1b", "gpipe", "interleaved", "zb")
TABLES = ("1f1b", "interleaved", "zb-h1", "zb-v")
SIZES = [(p, m, d) for p, m, d in product((2, 4, 8), (1, 2), (1, 2)) if p * m * d <= 8]


TOKENS, WIDTH, HIDDEN, EXAMPLES = 16, 8, 8, 2  # examples are per microbatch
UNINITIALIZED = stage_buffers.uninitialized
KEPT = 100  # cases after which what was compiled is forgotten
LAYOUTS = {"params/layers/*": "pipe=S(0)", "params/layers/up": "pipe=S(0) model=S(2)", "batch/*": "data=S(0)"}


def arguments(layers, microbatches):
    """Parameters, a batch of tokens with one to predict of each, and a key."""
    rng = np.random.default_rng(0)
    stacks = {"up": rng.normal(size=(layers, WIDTH, HIDDEN)) / 4, "down": rng.normal(size=(layers, HIDDEN, WIDTH)) / 4}
    params = {"embed": rng.normal(size=(TOKENS, WIDTH)), "layers": stacks, "scale": np.ones(WIDTH)}
    batch = {name: rng.integers(0, TOKENS, EXAMPLES * microbatches) for name in ("inputs", "targets")}
    return (*jax.tree.map(jnp.asarray, (params, batch)), jax.random.key(0))


def loss(params, batch, key, balance):
    """Cross entropy; a balance loss is a product of means over the examples."""

    def layer(carry, given):
        (x, load), (weights, key) = carry, given
        hidden = jnp.tanh(x @ weights["up"])
        if balance:
            load = load + jnp.sum(hidden.mean(0) * jnp.square(hidden).mean(0))
        kept = jax.random.bernoulli(key, 0.9, hidden.shape)
        x = x + jnp.where(kept, hidden / 0.9, 0) @ weights["down"]
        return (x * params["scale"], load), None

    keys = jax.random.split(key, params["layers"]["up"].shape[0])
    start = params["embed"][batch["inputs"]], jnp.zeros((), params["embed"].dtype)
    (x, load), _ = jax.lax.scan(layer, start, (params["layers"], keys))
    chosen = jnp.take_along_axis(jax.nn.log_softmax(x @ params["embed"].T), batch["targets"][..., None], -1)
    return 0.1 * load - chosen.mean()


def make_step(balance):
    """Gradient descent; the gradient itself, too."""

    def step(params, batch, key):
        value, gradient = jax.value_and_grad(loss)(params, batch, key, balance)
        return jax.tree.map(lambda p, g: p - g, params, gradient), value, gradient

    return step


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

    @property
    def layers(self):
        """One for every stage."""
        return self.pipe * self.chunks * (2 if self.schedule == "zb-v" else 1)


def cases():
    """All that there are; numbers without a schedule are left out."""
    for (p, model, data), recompute, balance in product(SIZES, ("stage", "none"), (False, True)):
        for m in sorted({p - 1, p, 2 * p, 32}):
            for table, names in ((False, NAMES), (True, TABLES)):
                for name, v in product(names, (1, 2, 3)):
                    several = name == "interleaved" or (name == "zb" and not table)
                    if v == 1 or (several and m % p == 0):
                        yield Case(name, table, v, p, model, data, m, recompute, balance)


def once_each_first(found):
    """In rounds: in each every schedule, mesh and number of microbatches once, whatever else it is run with."""
    seen = Counter()

    def turn(case):
        seen[key := replace(case, recompute="stage", balance=False)] += 1
        return seen[key]

    return sorted(found, key=turn)


def run(case, traced):
    """Whether the planned step has the numbers of the reference, the collectives of its plan, and no conditional.

    Args:
      traced: only the numbers, all of the step on one device.
    """
    args, step = arguments(case.layers, case.microbatches), make_step(case.balance)
    expected = reference(case.layers, case.microbatches, case.balance)
    if traced:
        split = {"params/layers/*": "pipe=S(0)"}
        compare(on_one_device(step, args, case.pipeline, md.Mesh(pipe=case.pipe), split), expected)
        return
    mesh = md.Mesh(pipe=case.pipe, data=case.data, model=case.model)
    sharded = md.parallelize(step, mesh, LAYOUTS, pipeline=case.pipeline)
    compare(sharded(*args), expected)
    try:
        sharded.verify(*args)  # which counts its permutes
    except md.VerifyError:  # NaN that a plan sends is a constant, which compilers do not send
        with mock.patch.object(stage_buffers, "uninitialized", UNINITIALIZED):
            md.parallelize(step, mesh, LAYOUTS, pipeline=case.pipeline).verify(*args)
    assert not re.search(r"stablehlo\.(case|if)\b", sharded.lower(*args).as_text())


@cache
def reference(layers, microbatches, balance):
    """What the plain step comes to, by microbatches where they differ."""
    args, step = arguments(layers, microbatches), make_step(balance)
    asked = md.Pipeline(microbatches, per_microbatch=True, batch="batch/*")
    found = on_one_device(step, args, asked, md.Mesh(pipe=1), {}) if balance else jax.jit(step)(*args)
    return [np.asarray(x) for x in jax.tree.leaves(found)]


def on_one_device(step, args, pipeline, mesh, layouts):
    """What the step in microbatches comes to, through stages where layouts split its layers."""
    program = to_microbatches(trace(step, args), pipeline, mesh, UserPins(layouts))
    return jax.jit(whole_function(program.graph))(*jax.tree.leaves(args))


def compare(got, expected):
    """AssertionError if results differ by more than rounding in float64."""
    for a, b in zip(jax.tree.leaves(got), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9 * max(1e-6, np.abs(np.asarray(b)).max()))


def nan(shape, dtype):
    """In place of what is there before anything is."""
    return jnp.full(shape, jnp.nan if jnp.issubdtype(dtype, jnp.inexact) else 7, dtype)


def main():
    """Run cases, each schedule on each mesh with each number of microbatches before any again; say which fail."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--limit", type=int, help="cases at most")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--skip", type=int, default=0, help="cases that were run before, with the same seed")
    options.add_argument("--traced", action="store_true", help="only the numbers, on one device, without other axes")
    asked = options.parse_args()
    jax.config.update("jax_enable_x64", True)
    compile_quickly()
    stage_buffers.uninitialized = nan
    found = [case for case in cases() if not asked.traced or case.model == case.data == 1]
    random.Random(asked.seed).shuffle(found)
    found = once_each_first(found)
    chosen, failed = list(enumerate(found, 1))[asked.skip :][: asked.limit], 0
    print(f"{len(chosen)} of {len(found)} cases, seed {asked.seed}, from number {asked.skip + 1} on", flush=True)
    for number, case in chosen:
        start, said = time.process_time(), "ok"
        try:
            run(case, asked.traced)
        except Exception as error:  # whatever it is, the other cases go on
            failed, said = failed + 1, f"FAILED: {type(error).__name__}: {str(error)[:300]}"
        print(f"{number} {case} {time.process_time() - start:.1f} s {said}", flush=True)
        if number % KEPT == 0:
            jax.clear_caches()
    print(f"{failed} of {len(chosen)} failed")
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
