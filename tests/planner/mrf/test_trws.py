"""Networks laid out flat are those that ``Network.add_replica`` puts together."""

import numpy as np
import pytest

from meshdsl.planner.mrf.elimination import eliminate
from meshdsl.planner.mrf.network import Network, Replica
from meshdsl.planner.mrf.trws import TRWS, MessagePassing, clip, pack
from meshdsl.util.arrays import unique_sorted


def test_float32_entries_are_no_higher():
    network, rng = Network(None, 2), np.random.default_rng(0)
    for v in range(2):
        network.add_variable(v, np.zeros(300))
    network.add(0, 1, np.concatenate([rng.random((299, 300)) * 1e13, np.full((1, 300), 1e30)]))
    stamp = Replica(network, [0, 1], np.array([[0, 1]]))
    (exact,), (half,) = pack([stamp]), pack([stamp], float32_entries=0)
    assert half.tables.dtype == np.float32 and (half.tables <= exact.tables).all()
    near = exact.tables < 1e14
    np.testing.assert_allclose(half.tables[near], exact.tables[near], rtol=2e-7)
    whole, rough = MessagePassing(exact), MessagePassing(half)
    for messages in (whole, rough):
        messages.run(2)
    assert whole.bound * (1 - 1e-6) <= rough.bound <= whole.bound


def test_variables_that_are_one_in_a_copy_keep_what_they_cost_together():
    part, whole = Network(None, 3), Network(None, 1)
    for v in range(3):
        part.add_variable(v, np.zeros(2))
    for (v, w), cost in {(0, 1): 1.0, (0, 2): 10.0, (1, 2): 100.0}.items():
        part.add(v, w, np.diag([cost, 0.0]))
    stamp = whole.replicate(part, [0, 1, 2], np.array([[0, 0, 0]]))
    whole.add_replica(stamp)
    flat = pack([stamp])[0]
    assert flat.unary.tolist() == whole.unary[0].tolist() == [111, 0] and not flat.flat.to.size


def test_messages_know_of_no_entry_above_their_limit():
    rng, cut = np.random.default_rng(0), Network(None, 2)
    for v in range(2):
        cut.add_variable(v, rng.integers(9, size=4).astype(float))
    cut.add(0, 1, np.where(rng.random((4, 4)) < 0.5, np.inf, rng.integers(9, size=(4, 4))))
    whole = cut.copy()
    clip(cut, 20.0)
    messages, capped = TRWS(whole, 20.0), TRWS(cut)
    assert np.array_equal(messages.tables, capped.tables) and np.array_equal(messages.unary, capped.unary)
    assert np.isinf(whole.pairwise[0][1]).any() and messages.tables.max() == 20.0


def test_only_tables_with_entries_above_the_limit_are_copied_and_once_for_both_ends():
    network, low, high = Network(), np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[1.0, np.inf], [7.0, 4.0]])
    a, b, c, d = (network.new_variable(np.zeros(2)) for _ in range(4))
    for source, target, table in ((a, b, low), (b, c, high), (d, c, high.T)):
        network.add(source, target, table)
    clip(network, 5.0)
    pairs = network.pairwise
    assert pairs[a][b] is low and network.pairwise[b][a].base is low
    for v, w, table in ((b, c, high), (c, b, high.T), (d, c, high.T), (c, d, high)):
        np.testing.assert_array_equal(pairs[v][w], np.minimum(table, 5.0))
    assert np.shares_memory(pairs[b][c], pairs[c][b]) and np.shares_memory(pairs[d][c], pairs[c][d])


@pytest.mark.parametrize("kept", [None, [0, 2]], ids=["all states", "some states"])
def test_what_is_not_decided_cannot_be_read(kept):
    network = Network(None, 3)
    for v in range(3):
        network.add_variable(v, np.arange(3.0))
    network.add(0, 1, np.ones((3, 3)))
    if kept:
        network.restrict(1, np.array(kept))
    network.reduce(1 << 10, frozenset((1, 2)))
    assert network.decode_labels([1, 2], [0, 2]).tolist() == [0, 0, 2]
    with pytest.raises(IndexError):
        network.decode_labels([2], [1])


@pytest.mark.parametrize("numbers", [[], [3], [2, 0, 2, 2, 5, 0], [1, 1, 1]])
def test_numbers_that_occur(numbers):
    numbers = np.array(numbers, dtype=np.intp)
    assert unique_sorted(numbers).tolist() == np.unique(numbers).tolist()


@pytest.mark.parametrize("merged", [False, True])
def test_copies_laid_out_at_once_are_those_of_the_network(merged):
    """Chains of three nodes and a hub, whose ends and one node are shared; nodes may be joined twice."""
    rng = np.random.default_rng(int(merged))
    sizes = [2, 3, 4, 2]
    part, other, whole = Network(None, 4), Network(None, 4), Network(None, 20)
    for v, size in enumerate(sizes):
        part.add_variable(v, rng.integers(9, size=size).astype(float))
    hub = part.new_variable(rng.integers(9, size=3).astype(float), after=1)
    for v, w in ((0, 1), (1, hub), (hub, 2), (0, 3), (2, 3)):
        part.add(v, w, rng.integers(9, size=(part.unary[v].size, part.unary[w].size)).astype(float))
    part.constant = 7.0
    for v, size in enumerate(sizes[:2]):
        other.add_variable(v, np.zeros(size))
    other.add(0, 1, rng.integers(9, size=sizes[:2]).astype(float))
    copies = np.array([[0, 1, 2, 9], [4, 5, 6, 9], [10, 11, 12, 9]])
    stamps = [whole.replicate(part, [0, 1, 2, 3], copies)]
    stamps += [whole.replicate(other, [0, 1], copies[:, :2])] if merged else []
    for stamp in stamps:
        whole.add_replica(stamp)
    flat, made = MessagePassing(pack(stamps)[0]), TRWS(whole)
    assert flat.order.tolist() == whole.order and flat.constant == whole.constant
    for messages in (flat, made):
        messages.run(4)
    assert (flat.lower, flat.cost) == pytest.approx((made.lower, made.cost), rel=1e-12)
    domains, tables = whole.listed()
    assert eliminate(domains, tables, [0] * len(domains), 1 << 20).cost == flat.cost
