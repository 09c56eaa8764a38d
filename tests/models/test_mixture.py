"""Mixtures of experts in the DSL: tokens are sent as by a loop over them, and one step is that of a plain JAX model."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshdsl as md
from meshdsl.models import mixture
from tests.models.test_gpt import plain
from tests.models.test_llama import BATCH, attention, norm, perceptron
from tests.models.values import quick, same_step, start
from tests.sweeps import swept

CONFIG = mixture.Config(
    *(2, 16, 24, 4, 2, 8, 8, 64), experts=4, choices=2, group=4, capacity=1.0, shared=16, remat="dots"
)


def seats_by_hand(chances, config):
    """Token by token: a slot of each of its experts while there are any; chances are [group place experts]."""
    groups, places, experts = chances.shape
    seats = np.zeros((groups, places, experts, config.slots))
    best = np.argsort(-chances, axis=-1, kind="stable")[..., : config.choices]
    for group in range(groups):
        used = [0] * experts
        for choice in range(config.choices):
            for place in range(places):
                e = best[group, place, choice]
                weight = chances[group, place, e]
                if config.weighed:
                    weight = weight / chances[group, place, best[group, place]].sum()
                if used[e] < config.slots:
                    seats[group, place, e, used[e]] = weight
                used[e] += 1
    return seats


@pytest.mark.parametrize("choices, capacity, weighed", [(1, 0.5, False), (2, 1.0, True)])
def test_tokens_are_seated_first_come_first_served(choices, capacity, weighed):
    config = replace(CONFIG, choices=choices, capacity=capacity, weighed=weighed)
    drawn = np.random.default_rng(choices).dirichlet(np.ones(4), (6, 4)).astype(np.float32)
    chances = md.named(drawn[None], "batch group place gates")
    where, weights = mixture.choose_experts(chances, config)
    seats = mixture.assign_slots(md.one_hot(where, "experts=4"), weights, config.slots)
    assert seats.shape == md.dims(f"batch=1 group=6 place=4 experts=4 slots={config.slots}")
    want = seats_by_hand(drawn, config)
    np.testing.assert_allclose(seats.array[0], want, rtol=1e-6)
    assert np.count_nonzero(want) < 6 * 4 * choices  # some are dropped


def test_the_balance_loss_is_1_at_best_and_the_number_of_experts_at_worst():
    evenly, to_one = jnp.eye(4)[:, None], jnp.eye(4)[[0, 0, 0, 0], None]
    for chosen, chance, loss in ((evenly, 0.25, 1.0), (to_one, to_one[:, 0], 4.0)):
        chances = md.named(jnp.broadcast_to(chance, (2, 1, 4, 4)), "batch group place gates")
        dims = "batch group place choices experts"
        assert mixture.balance_loss(md.named(jnp.broadcast_to(chosen, (2, 1, 4, 1, 4)), dims), chances) == loss


def mixture_by_hand(x, p, config):
    """Every expert on every token, and the sum with the weights of the seats."""
    chances = jax.nn.softmax(x @ p["router"]["kernel"])
    best, chosen = jax.lax.top_k(chances, config.choices)
    taken = jax.nn.one_hot(chosen, config.experts)  # [b s choices experts]
    order = taken.reshape(-1, config.group, *taken.shape[2:]).swapaxes(1, 2)  # [group choices place experts]
    rank = jnp.cumsum(order.reshape(order.shape[0], -1, config.experts), axis=1).reshape(order.shape) * order
    kept = (order * (rank <= config.slots)).swapaxes(1, 2).reshape(taken.shape)
    weights = jnp.einsum("bsce,bsc->bse", taken if config.ranks else kept, best / best.sum(-1, keepdims=True))
    experts = {name: {"kernel": p["experts"][name]} for name in ("gate", "up", "down")}
    each = [perceptron(x, jax.tree.map(lambda w: w[e], experts)) for e in range(config.experts)]
    made = sum(weights[..., e, None] * each[e] for e in range(config.experts)) + perceptron(x, p["shared"])
    return made, config.experts * jnp.sum(taken.mean((0, 1, 2)) * chances.mean((0, 1)))


def loss_by_hand(p, inputs, targets, config):
    x, lost = p["embed"][inputs], 0.0
    for i in range(config.layers):
        layer = jax.tree.map(lambda w: w[i], p["blocks"]["block"])
        x = x + attention(norm(x, layer["norm1"]), layer["attention"], config.theta)
        made, more = mixture_by_hand(norm(x, layer["norm2"]), layer["mixture"], config)
        x, lost = x + made, lost + more
    logits = norm(x, p["norm"]) @ p["head"]["kernel"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean() + mixture.BALANCE * lost


@swept("config", [CONFIG, replace(CONFIG, ranks=2)], ids=["slots", "no drops"], left=(CONFIG,))
def test_a_step_is_that_of_the_plain_model(config):
    program = mixture.program(config, mixture.RULES["expert"], batch=8)
    params, state = start(program)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4, b2=0.95, weight_decay=0.1))
    arrays = (BATCH["inputs"].array, BATCH["targets"].array)
    made = quick(program.step)(params, state, BATCH)
    same_step(made, plain(params), partial(loss_by_hand, config=config), arrays, optimizer, plain)


def test_a_bias_moves_by_its_rate_towards_equal_loads_and_is_not_in_the_weights():
    chances = md.named(jnp.array([[0.7, 0.2, 0.1], [0.6, 0.3, 0.1]]), "batch gates")
    config = replace(CONFIG, experts=3, choices=1, weighed=False, bias=0.5)

    def step(bias):
        where, weights = mixture.choose_experts(chances, config, bias)
        return mixture.bias_loss(md.one_hot(where, "experts=3"), bias), (where.array[:, 0], weights.array[:, 0])

    bias = md.named(jnp.zeros(3), "gates")
    (value, (where, _)), gradient = jax.value_and_grad(step, has_aux=True)(bias)
    assert (value, where.tolist(), gradient.array.tolist()) == (0, [0, 0], [1, -1, -1])
    _, (where, weights) = step(bias - config.bias * gradient)
    assert where.tolist() == [1, 1] and weights.tolist() == pytest.approx([0.2, 0.3])


def test_the_planner_finds_the_exchanges_of_gshard():
    """Tokens go to the experts' devices and back, in each layer, forward and backward; no weight is sent for them."""
    config = mixture.Config(*(2, 1024, 4096, 8, 8, 128, 1024, 1024), experts=8)
    program = mixture.program(config, mixture.RULES["expert"], batch=64)
    mesh = md.Mesh(data=8, topology=md.topology("dgx-h100"))
    plan = md.parallelize(program.step, mesh, rules=program.rules).plan(*program.args)
    sent = (64, 2, 8, config.slots, 1024)
    exchanges = [c for c in plan.collectives if sorted(c.shape) == sorted(sent)]
    assert [(c.kind, c.axes, c.trips, c.phase) for c in exchanges] == [
        ("all-to-all", ("data",), 2, phase) for phase in ("forward", "forward", "backward", "backward")
    ]
    assert not [c for c in plan.collectives if sorted(c.shape) == [8, 1024, 4096]]
