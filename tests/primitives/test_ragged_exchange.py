"""Rows whose receivers are data: a loop over rows as the reference, on every platform's collective."""

import dataclasses
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import meshdsl as md
from meshdsl.layouts.topology import Link
from meshdsl.lowering.local import ragged_exchange as program

RNG = np.random.default_rng(3)
BATCH, ROWS, LENGTH, FEATURES = 2, 16, 32, 30
SLOW = md.Topology("slow", 1e8, 1e8, 1e9, 4e9, 0.0, (Link(1e-6, 1e6),))
PINS = {"**": "data=S(1)", "sizes": "data=B"}


def routing(kind, ranks):
    """Sizes per batch, sender and receiver; "too many" are more than the first receiver takes and most senders have."""
    if kind == "random":
        return RNG.multinomial(ROWS - 2, [1 / ranks] * ranks, size=(BATCH, ranks))
    if kind == "too many":
        sizes = RNG.integers(0, ROWS // 4, (BATCH, ranks, ranks))
        sizes[:, :, 0] = LENGTH // ranks + 2
        return sizes
    if kind == "to one":
        return ROWS // 4 * (np.arange(ranks) == ranks // 2) * np.ones((BATCH, ranks, 1), int)
    return np.stack([ROWS * np.eye(ranks, dtype=int)[RNG.permutation(ranks)] for _ in range(BATCH)])


def received(x, sizes, length):
    """Row by row, those alone that are there and that fit."""
    made = np.zeros((*x.shape[:2], length, x.shape[-1]), x.dtype)
    for b, receiver in np.ndindex(x.shape[:2]):
        rows = [
            row
            for sender in range(x.shape[1])
            for row in x[b, sender][sizes[b, sender, :receiver].sum() :][: sizes[b, sender, receiver]]
        ]
        made[b, receiver, : len(rows)] = np.reshape(rows[:length], (-1, x.shape[-1]))
    return made


def sent_as_documented(operand, output, at, sizes, to, expected, *, axis_name):
    """``lax.ragged_all_to_all`` as its documentation describes it; compilers for CPU have none."""
    held = [lax.all_gather(x, axis_name) for x in (operand, at, sizes, to)]
    devices, slices, me = len(held[0]), len(at) // len(held[0]), lax.axis_index(axis_name)
    places = jnp.arange(len(output))
    for device in range(devices):
        rows, *slice_of = (x[device] for x in held)
        for i in range(slices):
            begin, size, place = (x[me * slices + i] for x in slice_of)
            here = (places >= place) & (places < place + size)
            output = jnp.where(here[:, None], rows[begin + places - place], output)
            is_within = (begin + size <= len(rows)) & (place + size <= len(output))  # also if nothing is sent
            agreed = (size == expected[device * slices + i]) & is_within & (jnp.minimum(begin, place) >= 0)
            output = jnp.where(agreed, output, jnp.nan)
    return output


def both_ways(length):
    def step(x, sizes):
        made, back = jax.vjp(lambda x: md.ragged_exchange(x, sizes, length), x)
        return made, back(jnp.sin(made))[0]

    return step


@pytest.mark.parametrize("ranks, devices", [(8, 8), (8, 4)])
@pytest.mark.parametrize("how", ["rounds", "rounds for a ragged plan", "ragged"])
def test_every_row_arrives_once_and_goes_back_whatever_the_routing(how, ranks, devices, monkeypatch):
    if how == "ragged":
        monkeypatch.setattr(program, "_RAGGED", ("cpu",))
        monkeypatch.setattr(lax, "ragged_all_to_all", sent_as_documented)
    topology = dataclasses.replace(SLOW, ragged=how != "rounds")
    x = RNG.normal(size=(BATCH, ranks, ROWS, FEATURES)).astype("float32")
    numbers = np.broadcast_to(np.arange(1, 1 + x[..., :1].size).reshape(x[..., :1].shape), x.shape)
    for kind in ("random", "to one", "all of a rank to one", "too many"):
        sizes = routing(kind, ranks)
        sharded = md.parallelize(
            both_ways(LENGTH), md.Mesh(data=devices, topology=topology), PINS, outputs={"**": "data=S(1)"}
        )
        assert {c.kind for c in sharded.plan(x, sizes).collectives} == {"all-to-all"}
        sent = np.isin(numbers, received(numbers, sizes, LENGTH))
        for run in (sharded, both_ways(LENGTH)):
            made, back = run(x, sizes)
            np.testing.assert_array_equal(made, received(x, sizes, LENGTH))
            np.testing.assert_allclose(back, np.where(sent, np.sin(x), 0), rtol=1e-6)


@pytest.mark.parametrize(
    "sizes, fitting",
    [
        ([[3, 3], [2, -1]], [[3, 1], [2, 0]]),  # rank 0 has 4 rows, and takes 4
        ([[3, 1], [2, 2]], [[3, 1], [2, 2]]),  # what rank 0 does not take of rank 1 is in front of what rank 1 takes
        (np.full((2, 2), 2**31 - 1), [[4, 0], [4, 0]]),
        (np.array([[2**32 - 1, 1], [0, 4]], "uint32"), [[4, 0], [0, 4]]),
        (np.array([[127, 1], [0, -128]], "int8"), [[4, 0], [0, 0]]),
    ],
    ids=str,
)
def test_what_is_neither_there_nor_fits_is_left_out(sizes, fitting):
    x = RNG.normal(size=(1, 2, 4, 3)).astype("float32")
    found = md.ragged_exchange(x, np.array([sizes]), np.int64(4))
    np.testing.assert_array_equal(found, received(x, np.array([fitting]), 4))


def test_batches_may_be_mapped():
    x, sizes = RNG.normal(size=(3, BATCH, 4, 8, 2)).astype("float32"), RNG.integers(0, 3, (BATCH, 4, 4))
    found = jax.vmap(lambda x: md.ragged_exchange(x, sizes, 8))(x)
    np.testing.assert_array_equal(found, [md.ragged_exchange(each, sizes, 8) for each in x])


@pytest.mark.parametrize(
    "ragged, backend, features, rows, text",
    [
        (True, "", FEATURES, 16, "the routed rows alone"),
        (False, "", FEATURES, 32, "rounds of equal slots"),
        (True, "tpu", 64, 16, "the routed rows alone"),
        (True, "tpu", 63, 32, "rounds of equal slots"),  # padded, as TPUs do, rows are more than twice as long
    ],
)
def test_plans_count_the_smaller_side_and_rounds_the_larger(ragged, backend, features, rows, text):
    x, sizes = RNG.normal(size=(BATCH, 8, ROWS, features)).astype("float32"), routing("random", 8)
    mesh = md.Mesh(data=8, topology=dataclasses.replace(SLOW, ragged=ragged, backend=backend))
    sharded = md.parallelize(both_ways(LENGTH), mesh, PINS, outputs={"**": "data=S(1)"})
    for sent in sharded.plan(x, sizes).collectives:
        assert (sent.kind, sent.bytes) == ("all-to-all", BATCH * rows * features * 4 * 7 // 8)
        assert text in sent.reason
    assert sharded.verify(x, sizes).equal


@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu, which compiles for TPUs, is not installed")
@pytest.mark.parametrize("ranks, features, rows", [(4, 256, 512), (8, 256, 512), (4, 128, 640)])
def test_a_tpu_is_given_one_ragged_collective_or_rounds_where_it_would_pad_rows(ranks, features, rows):
    array = (
        jax.ShapeDtypeStruct((BATCH, ranks, 512, features), jnp.bfloat16),
        jax.ShapeDtypeStruct((BATCH, ranks, ranks), int),
    )
    sharded = md.parallelize(
        both_ways(640), md.Mesh(data=4, topology="tpu-v5e"), PINS, outputs={"**": "data=S(1)"}, memory="1TB"
    )
    (line,) = sharded.verify(*array, target="tpu-v5e:2x2").lines
    assert line.made == line.compiled == line.planned == 2 * BATCH * ranks // 4 * rows * features * 2 * 3 // 4


@pytest.mark.parametrize(
    "change, text",
    [
        ({"length": 0}, "length=0 is no number of rows"),
        ({"length": 9}, "length=9 is no multiple of ranks=4; make it 12"),
        ({"x": np.ones((4, 6, 3))}, "rows=6 is no multiple of ranks=4; make it 8"),
        ({"x": np.ones((4, 8))}, r"x: shape \(4, 8\) is not \[... ranks rows features\], of at least one rank"),
        ({"x": np.ones((0, 8, 3)), "sizes": np.ones((0, 0), int)}, r"x: shape \(0, 8, 3\) is not"),
        ({"sizes": np.ones((4, 3), int)}, r"sizes: shape \(4, 3\) is not \[... ranks ranks\] \(4, 4\), to fit x"),
        ({"sizes": np.ones((4, 4))}, "float32 counts no rows; give integers"),
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not_fit_is_refused(change, text):
    given = {"x": np.ones((4, 8, 3)), "sizes": np.ones((4, 4), int), "length": 8} | change
    with pytest.raises(md.ArgumentError, match=text):
        md.ragged_exchange(**given)
