"""Tables packed over owners: the lookups and updates of the tables alone, and loads as even as they can be."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshdsl.errors import ArgumentError
from meshdsl.models.embeddings import pack_tables
from tests.models.values import quick

ROWS, LOADS, WIDTH, BATCH = (7, 30, 12, 5, 9), (3, 1, 2, 1, 1), 4, 16


@pytest.mark.parametrize("owners", [1, 3, 8])  # of 8, three own nothing
def test_lookups_and_updates_are_those_of_the_tables_alone(owners):
    draw = np.random.default_rng(0)
    tables = [draw.normal(size=(rows, WIDTH)).astype(np.float32) for rows in ROWS]
    ids = [draw.integers(-1, rows + 1, (BATCH, load)) for rows, load in zip(ROWS, LOADS)]  # some are outside
    gradient = draw.normal(size=(BATCH, len(ROWS), WIDTH)).astype(np.float32)
    places = pack_tables(ROWS, LOADS, owners)

    @quick
    def ours(tables, ids, gradient):
        packed, squares = places.pack(tables), jnp.zeros((owners, places.height))
        found = places.lookup(packed, ids)
        for _ in range(2):
            packed, squares = places.adagrad(packed, squares, ids, gradient, 0.1)
        return found, places.unpack(packed)

    found, updated = ours(tables, np.concatenate(ids, 1), gradient)
    for i, (table, at) in enumerate(zip(tables, ids)):
        inside = (at >= 0) & (at < len(table))
        rows = np.where(inside[..., None], table[np.where(inside, at, 0)], 0)
        np.testing.assert_allclose(found[:, i], rows.sum(1), rtol=1e-5, atol=1e-6)
        whole = np.zeros_like(table)
        for example, lookup in zip(*np.nonzero(inside)):
            whole[at[example, lookup]] += gradient[example, i]
        want, squares = table, np.zeros(len(table))
        for _ in range(2):
            squares = squares + np.mean(whole**2, 1)
            want = want - 0.1 / np.sqrt(squares + 1e-8)[:, None] * whole
        np.testing.assert_allclose(updated[i], want, rtol=1e-5, atol=1e-5)


def test_the_busiest_owner_has_at_most_a_third_more_than_it_must():
    draw = np.random.default_rng(0)
    for _ in range(20):
        loads = draw.integers(1, 20, 6).tolist()
        best = min(max(np.bincount(owner, loads, 3)) for owner in product(range(3), repeat=6))
        tables = pack_tables([10] * 6, loads, 3)
        assert 1 <= tables.load_balance * sum(loads) / 3 / best <= 4 / 3


def test_capacity_goes_before_load():
    assert pack_tables((1000, 50, 400, 300), (3, 2, 2, 1), 2).owner == (0, 1, 1, 0)
    tables = pack_tables((1000, 50, 400, 300), (3, 2, 2, 1), 2, capacity=1000)
    assert tables.owner == (0, 1, 1, 1) and tables.height == 1000


def test_what_does_not_fit_is_named():
    with pytest.raises(
        ArgumentError, match=r"capacity=500: table 0 of 1000 rows fits beside no owner's \[0, 0\]; raise"
    ):
        pack_tables((1000, 50), (3, 2), 2, capacity=500)
    with pytest.raises(ArgumentError, match="loads: 1 of them for 2 tables; give one load per table"):
        pack_tables((1000, 50), (3,), 2)
    for rows, owners, name in (((1000, 0), 2, r"rows=\(1000, 0\)"), ((1000, 50), 2.0, "owners=2.0")):
        with pytest.raises(ArgumentError, match=f"{name}: must be ints of at least 1"):
            pack_tables(rows, (3, 2), owners)
    tables = pack_tables((1000, 50), (3, 2), 2)
    with pytest.raises(ArgumentError, match=r"ids: \[8, 4\] is not \[batch 5\]; give a column per row"):
        jax.eval_shape(tables.lookup, jnp.zeros((2, 1000, 4)), jnp.zeros((8, 4), int))
    with pytest.raises(ArgumentError, match=r"packed: \[2, 50, 4\] is not \[2 1000 width\]"):
        jax.eval_shape(tables.lookup, jnp.zeros((2, 50, 4)), jnp.zeros((8, 5), int))
    for ids in (jnp.zeros((8, 5)), jnp.zeros((0, 5), int)):
        with pytest.raises(ArgumentError, match="has no integers; give those of at least one example"):
            tables.lookup(jnp.zeros((2, 1000, 4)), ids)
    with pytest.raises(ArgumentError, match=r"tables: widths \[4, 8\]; pack those of one width"):
        tables.pack([jnp.zeros((1000, 4)), jnp.zeros((50, 8))])
    with pytest.raises(ArgumentError, match=r"tables: \[50, 1000\] rows, packed for \[1000, 50\]"):
        tables.pack([jnp.zeros((50, 4)), jnp.zeros((1000, 4))])
