"""What operations move by the model of kernels: read once, written or computed again, copied around loops."""

from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from meshdsl.api import parallelize
from meshdsl.errors import ArgumentError
from meshdsl.ir.graph import walk
from meshdsl.layouts import Mesh
from meshdsl.layouts.topology import FUSIONS, load_topology, save_topology, topology
from meshdsl.planner.bounds.trivial import least_seconds
from meshdsl.planner.costs.fusion import operands_and_results
from meshdsl.planner.costs.traffic import traffic_of
from meshdsl.trace import trace

X, W = np.zeros((64, 64), np.float32), np.zeros((64, 64), np.float32)
ONE = X.nbytes


def moved(step, *args, fusion="kernels"):
    """Returns bytes accessed and copied, and kernels, by name of operation; whole ones alone are of one array."""
    graph = trace(step, args).graph
    traffic, found = traffic_of(graph, fusion), Counter()
    for home, op in walk(graph):
        one = traffic.of(op)
        sizes = [getattr(x, "bytes", 0) * home.trips for x in operands_and_results(op)]
        found[op.name] += sum(n * size for n, size in zip(one.accesses, sizes, strict=True)) / ONE
        found["copied"] += sum(n * size for n, size in zip(one.copied or [0] * len(sizes), sizes, strict=True)) / ONE
        found["kernels"] += home.trips * one.starts
    return found


def test_operations_that_share_operands_are_one_kernel_which_reads_them_once():
    def step(x, w):
        y = x @ w
        return jnp.tanh(y), jnp.exp(y) * y

    found = moved(step, X, W)
    assert found["kernels"] == 2
    assert found["tanh"] == 2  # y and its result
    assert found["exp"] + found["mul"] == 1  # their result
    chains = moved(step, X, W, fusion="chains")
    assert chains["tanh"] + chains["exp"] + chains["mul"] == 5


def test_what_waits_for_another_product_is_another_kernel():
    def step(x, w):
        y = x @ w
        return jnp.tanh(y @ w) + y

    found = moved(step, X, W)
    assert found["kernels"] == 3 and found["tanh"] + found["add"] == 3


def test_a_value_is_computed_again_where_that_moves_fewer_bytes():
    """Twice x, by both of its readers; a sum of three arrays is written instead."""

    def cheap(x, w):
        c = 2 * x
        y = (x @ w) + c
        return (y @ w) + c

    assert moved(cheap, X, W)["mul"] == 0
    assert moved(cheap, X, W)["add"] == 6  # a product and x are read, a sum is written, twice

    def dear(x, u, v, w):
        c = x + u + v
        y = (x @ w) * c
        return (y @ w) * c

    assert moved(dear, X, X, X, W)["add"] == 4 and moved(dear, X, X, X, W)["mul"] == 6


def test_softmax_and_normalisation_read_their_operand_once():
    def normalised(x):
        y = x - jnp.mean(x, -1, keepdims=True)
        return y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)

    for rows in (jax.nn.softmax, normalised):
        found = moved(rows, X)
        assert found.pop("kernels") == 1
        assert sum(found.values()) == pytest.approx(2, abs=0.1)
    assert sum(moved(lambda x: x / jnp.sum(x, 0), X).values()) - 2 == pytest.approx(3, abs=0.1)  # not along columns


def test_loops_copy_slices_of_products_and_fill_stacks_with_zeros():
    layers = np.zeros((3, *W.shape), np.float32)

    def products(x, ws):
        return lax.scan(lambda x, w: (x @ w, x @ w), x, ws)

    assert moved(products, X, layers)["copied"] == 3 * (2 + 3)  # slices of operands, of results with their zeros

    def fused(x, ws):
        return lax.scan(lambda x, w: (x * w, jnp.exp(x + w)), x, ws)

    assert moved(fused, X, layers)["copied"] == 3  # zeros alone: the kernel writes the slice into the stack
    assert moved(products, X, layers, fusion="chains")["copied"] == 0


def test_parts_of_arrays_are_read_in_part_and_views_are_free():
    assert moved(lambda x: jnp.exp(x[:16]), X)["slice"] == pytest.approx(0.25)
    assert moved(lambda x, w: jnp.exp(x).reshape(4, 16, 64) * w, X, np.zeros((4, 16, 64), np.float32))["kernels"] == 1


def test_a_kernel_that_writes_nothing_does_not_run():
    """What is computed again by all of its readers, and read by nothing else."""

    def step(x, w):
        small = x[0, 0] * 2.0
        return x * small, jnp.tanh(w[0, 1] * small)

    found = moved(step, X, W)
    assert found["kernels"] == 2


@pytest.mark.parametrize("fusion", FUSIONS)
def test_the_planner_searches_and_bounds_the_prices_of_both_models(fusion):
    def step(w, x):
        gradient = jax.grad(lambda w: jnp.mean(jax.nn.gelu(x @ w) ** 2))(w)
        return w - 0.1 * gradient

    mesh = Mesh(data=4, model=2, topology=replace(topology("dgx-h100"), fusion=fusion))
    plan = parallelize(step, mesh, {"x": "data=S(0)"}).plan(W, X)
    assert plan.gap < 1e-6
    assert least_seconds(trace(step, (W, X)), mesh) <= plan.seconds


def test_a_topology_states_its_model(tmp_path):
    for name in ("cpu", "dgx-h100"):
        save_topology(topology(name), tmp_path / "saved.toml")
        assert load_topology(tmp_path / "saved.toml") == topology(name)
    assert topology("cpu").fusion == "chains" and topology("tpu-v5e").fusion == "kernels"
    with pytest.raises(
        ArgumentError, match="fusion='kernel' is neither 'chains' nor 'kernels'; did you mean 'kernels'"
    ):
        replace(topology("cpu"), fusion="kernel")
