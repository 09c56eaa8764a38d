"""Pipelines: their predictions, their step time and their memory, beside no pipeline and beside the peers' way.

python -m bench.pipeline --rounds 10

One decoder in plain JAX, its layers in a scan, on 8 virtual CPU devices. The peers' way is what MaxText's pipelines do
(one round of its circular one): a loop over microbatches and stages, forward only, in which every stage works at once
and a buffer of stage inputs is rolled by one place; what is differentiated is that whole loop, the stage recomputed. It
is written here by hand, with jax.jit and shardings, and its numbers are compared with ours before anything is timed.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import meshdsl as md
from bench.report import interleave, machine, ratio, table
from meshdsl.calibrate import calibrate
from meshdsl.layouts.topology import Topology
from meshdsl.lowering.boundary import device_mesh
from meshdsl.units import bytes_text

STAGES, DATA, RATE = 4, 2, 0.1
NOTHING, PEER = "no pipeline, data=8", "rolled buffer + autodiff (peers)"
SCHEDULES = {"gpipe": ("gpipe", 1), "1f1b": ("1f1b", 1), "interleaved x2": ("interleaved", 2), "zb": ("zb", 1)}
Params = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """Of the model and its batch; ``each`` sequences make a microbatch."""

    layers: int = 8
    embed: int = 256
    hidden: int = 1024
    words: int = 1024
    seq: int = 32
    microbatches: int = 16
    each: int = 4

    @property
    def batch(self) -> int:
        """Sequences of a step."""
        return self.microbatches * self.each


def arguments(sizes: Sizes) -> tuple[Params, dict[str, Any]]:
    """Parameters and a batch of random words."""
    rng = np.random.default_rng(0)
    shapes = {"mix": (sizes.embed, sizes.embed), "up": (sizes.embed, sizes.hidden), "down": (sizes.hidden, sizes.embed)}
    layers = {name: rng.normal(size=(sizes.layers, *shape)) / shape[0] ** 0.5 / 4 for name, shape in shapes.items()}
    params = {"embed": 0.05 * rng.normal(size=(sizes.words, sizes.embed)), "layers": layers}
    batch = {name: rng.integers(0, sizes.words, (sizes.batch, sizes.seq), np.int32) for name in ("inputs", "targets")}
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params), jax.tree.map(jnp.asarray, batch)


def layer(x: jax.Array, weights: Params) -> tuple[jax.Array, None]:
    """Causal mixing of what came before, and a gated product."""
    y = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    scores = jnp.einsum("...se,...te->...st", y @ weights["mix"], y) / x.shape[-1] ** 0.5
    causal = jnp.tril(jnp.ones((x.shape[-2], x.shape[-2]), bool))
    x = x + jnp.einsum("...st,...te->...se", jax.nn.softmax(jnp.where(causal, scores, -1e9)), y)
    return x + jax.nn.gelu(x @ weights["up"]) @ weights["down"], None


def loss_of(params: Params, x: jax.Array, targets: jax.Array) -> jax.Array:
    """Cross entropy; the embedding is tied."""
    logits = x @ params["embed"].T
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1))


def step(params: Params, batch: dict[str, Any]) -> tuple[Params, jax.Array]:
    """Gradient descent on the model as anybody writes it."""

    def loss(params: Params) -> jax.Array:
        x, _ = lax.scan(jax.checkpoint(layer), params["embed"][batch["inputs"]], params["layers"])
        return loss_of(params, x, batch["targets"])

    return descend(params, loss)


def descend(params: Params, loss: Callable[[Params], jax.Array]) -> tuple[Params, jax.Array]:
    """The parameters after a step, and the loss before it."""
    value, gradient = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - RATE * g, params, gradient), value


class Peer:
    """The rolled buffer, with jax.jit and shardings."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes, self.devices = sizes, device_mesh(md.Mesh(pipe=STAGES, data=DATA))
        self.stages, self.whole = self.at("pipe"), self.at()
        weights = {"embed": self.whole, "layers": dict.fromkeys(("mix", "up", "down"), self.stages)}
        batch = dict.fromkeys(("inputs", "targets"), self.at("data"))
        self.places = weights, batch
        self.jitted = jax.jit(
            self.step, in_shardings=self.places, out_shardings=(weights, self.whole), donate_argnums=0
        )

    def at(self, *axes: str | None) -> NamedSharding:
        """A sharding by the axes of its first dims."""
        return NamedSharding(self.devices, PartitionSpec(*axes))

    def step(self, params: Params, batch: dict[str, Any]) -> tuple[Params, jax.Array]:
        """The same step, through the loop."""
        m = self.sizes.microbatches

        def loss(params: Params) -> jax.Array:
            inputs, targets = (batch[name].reshape(m, -1, self.sizes.seq) for name in ("inputs", "targets"))
            made = self.piped(params["layers"], self.held(params["embed"][inputs], None, "data"))
            return loss_of(params, made, targets)

        return descend(params, loss)

    def held(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Held to a sharding."""
        return lax.with_sharding_constraint(x, self.at(*axes))

    def piped(self, layers: Params, given: jax.Array) -> jax.Array:
        """All microbatches through all stages."""
        dealt = jax.tree.map(lambda w: self.held(w.reshape(STAGES, -1, *w.shape[1:]), "pipe"), layers)
        stage = jax.vmap(jax.checkpoint(lambda x, own: lax.scan(layer, x, own)[0]))

        def tick(state: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
            start = given[jnp.minimum(t, len(given) - 1)]
            first = jnp.arange(STAGES).reshape(-1, 1, 1, 1) == 0
            state = self.held(jnp.where(first, start[None], jnp.roll(state, 1, 0)), "pipe", "data")
            state = self.held(stage(state, dealt), "pipe", "data")
            return state, state  # what the last stage made is picked once, after the loop

        state = self.held(jnp.zeros((STAGES, *given.shape[1:]), given.dtype), "pipe", "data")
        _, made = lax.scan(tick, state, jnp.arange(len(given) + STAGES - 1))
        return made[STAGES - 1 :, -1]


class Ours:
    """A planned step: a schedule over the stages, or the data alone."""

    def __init__(self, sizes: Sizes, topology: Topology, schedule: str | None) -> None:
        self.sizes, self.args = sizes, arguments(sizes)
        axes = {"data": DATA * STAGES} if schedule is None else {"pipe": STAGES, "data": DATA}
        layouts = {"batch/*": "data=S(0)"} | ({"params/layers/*": "pipe=S(0)"} if schedule else {})
        asked = md.Pipeline(sizes.microbatches, *SCHEDULES[schedule]) if schedule else None
        mesh = md.Mesh(topology=topology, **axes)
        self.sharded = md.parallelize(step, mesh, layouts, donate_argnums=0, pipeline=asked)
        self.plan = self.sharded.plan(*self.args)
        self.places = self.sharded.input_shardings(*self.args)[0]

    @cached_property
    def compiled(self) -> Any:
        """Compiled; ``seconds`` says how long that took."""
        start = time.perf_counter()
        found = self.sharded.lower(*self.args).compile()
        self.seconds = time.perf_counter() - start
        return found


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--memory", action="store_true", help="only how memory grows with the microbatches")
    asked = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    if not asked.memory:
        timed(Sizes(), asked.rounds)
    growing(Sizes(layers=4, embed=64, hidden=256, words=256, seq=16, each=4))
    print(machine())


def timed(sizes: Sizes, rounds: int) -> None:
    """Step time, compile time and memory of every schedule, of no pipeline, and of the peers' way."""
    topology = calibrate(md.Mesh(pipe=STAGES, data=DATA))
    ours = {NOTHING: Ours(sizes, topology, None)} | {name: Ours(sizes, topology, name) for name in SCHEDULES}
    peer, args = Peer(sizes), arguments(sizes)
    start = time.perf_counter()
    compiled = peer.jitted.lower(*args).compile()
    rows = {PEER: [f"{time.perf_counter() - start:.1f}", temporary(compiled)]}
    for name, each in ours.items():
        size = temporary(each.compiled)
        rows[name] = [f"{each.seconds:.1f}", size]
    steps = {name: stepper(each.sharded, each.args, each.places) for name, each in ours.items()}
    steps[PEER] = stepper(peer.jitted, args, peer.places)
    check(steps)
    seconds = interleave({name: advance for name, (advance, _) in steps.items()}, rounds)
    found = []
    for name, times in seconds.items():
        plan = ours[name].plan if name in ours else None
        pair = str(ratio(times, seconds[NOTHING])), str(ratio(times, seconds[PEER]))
        found.append((name, *predicted(plan), f"{np.median(times):.3f}", *pair, *rows[name]))
    head = ("program", "ticks", "bubble", "stash", "lockstep, s", "asynchronous, s", "measured, s", "/ no pipeline")
    print(table((*head, "/ peers", "compile, s", "temporary"), found), f"\n{rounds} interleaved steps, {sizes}\n")


def predicted(plan: Any) -> tuple[str, ...]:
    """What a plan says of its pipeline."""
    if plan is None or not plan.pipeline:
        return ("", "", "", "" if plan is None else f"{plan.seconds:.3f}", "")
    found, stash = plan.pipeline, " ".join(map(str, plan.pipeline.stash))
    both = f"{found.forecast.lockstep:.3f}", f"{found.forecast.asynchronous:.3f}"
    return str(found.ticks), f"{found.bubble:.1%}", stash, *both


def temporary(compiled: Any) -> str:
    """Bytes of a device that the compiled program needs beside arguments and results."""
    return bytes_text(compiled.memory_analysis().temp_size_in_bytes)


def stepper(run: Callable[..., Any], args: tuple[Any, ...], places: Any) -> tuple[Callable[[], Any], list[float]]:
    """A function that takes one more step of a run of its own, and the losses so far."""
    params, batch = jax.device_put(jax.tree.map(partial(jnp.array, copy=True), args), places)
    state, losses = [params], list[float]()

    def advance() -> Any:
        state[0], loss = run(state[0], batch)
        losses.append(float(loss))
        return state[0]

    return advance, losses


def check(steps: dict[str, tuple[Callable[[], Any], list[float]]]) -> None:
    """Two steps of every program have the same losses."""
    for advance, _ in steps.values():
        advance(), advance()
    first, *others = (losses for _, losses in steps.values())
    assert all(np.allclose(losses, first, rtol=1e-4) for losses in others), steps


def growing(sizes: Sizes) -> None:
    """Temporary bytes as microbatches of one size get more; and all that a device needs, beside the plan's."""
    rows = []
    for m in (8, 16, 32, 64):
        more = Sizes(**{**vars(sizes), "microbatches": m})
        ours = {name: Ours(more, md.topology("cpu"), name) for name in ("1f1b", "gpipe")}
        found = [cell for each in ours.values() for cell in (temporary(each.compiled), both(each))]
        rows.append((m, *found, temporary(Peer(more).jitted.lower(*arguments(more)).compile())))
    head = (f"{name}{more}" for name in ("1f1b", "gpipe") for more in ("", ", all (plan)"))
    print(table(("microbatches", *head, PEER), rows), f"\n{sizes}\n")


def both(ours: Ours) -> str:
    """Bytes of a device at the fullest point, as compiled and as planned."""
    found = ours.compiled.memory_analysis()
    held = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return f"{bytes_text(found.temp_size_in_bytes + held)} ({bytes_text(ours.plan.memory)})"


if __name__ == "__main__":
    main()
