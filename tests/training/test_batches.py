"""Batches: order, epochs, resuming, and where they lie."""

import threading
import time
from itertools import islice

import grain.python as grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.errors import ArgumentError
from meshdsl.lowering.shardings import device_mesh, named_sharding
from meshdsl.training.batches import (
    ArrayRecords,
    Batches,
    BatchesEnded,
    ReadAhead,
    ReadingStopped,
    at_least,
    host_feed,
    sharded_feed,
    shuffled,
)
from meshdsl.training.datasets.text import Windows, fixed_batches, text_batches

TOKENS = (np.arange(1000) % 256).astype(np.uint16)


def test_windows_predict_the_next_token_and_cover_the_text_once():
    windows = [Windows(TOKENS, 9)[i] for i in range(len(Windows(TOKENS, 9)))]
    inputs = np.concatenate([w["inputs"] for w in windows])
    np.testing.assert_array_equal(inputs, TOKENS[: len(inputs)])
    np.testing.assert_array_equal(np.concatenate([w["targets"] for w in windows]), TOKENS[1 : len(inputs) + 1])
    assert len(TOKENS) - len(inputs) <= 9


def test_batches_go_on_after_any_number_and_give_the_rows_asked_for():
    batches = text_batches(TOKENS, 4, 8)
    seen = list(islice(batches, 70))
    for expected, got, rows in zip(seen[33:], host_feed(batches)(33), batches.rows([1, 3], 33)):
        np.testing.assert_array_equal(got["inputs"], expected["inputs"])
        np.testing.assert_array_equal(rows["targets"], expected["targets"][[1, 3]])


def test_other_iterables_are_followed_from_their_begin():
    assert list(host_feed([1, 2, 3, 4])(2)) == [3, 4]


def test_an_epoch_holds_every_window_and_the_next_is_shuffled_anew():
    stream = iter(text_batches(TOKENS, 31, 8))
    epochs = [np.concatenate([next(stream)["inputs"][:, 0] for _ in range(4)]) for _ in range(2)]
    starts = [Windows(TOKENS, 8)[i]["inputs"][0] for i in range(124)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(starts)
    assert list(epochs[0]) != list(epochs[1])


def test_records_that_are_not_repeated_end():
    batches = Batches(grain.MapDataset.source(ArrayRecords({"x": np.arange(10)})), 3)
    assert [b["x"].tolist() for b in batches] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert [b["x"].tolist() for b in batches.rows([0], 2)] == [[6]]


def test_data_that_are_no_batches():
    with pytest.raises(ArgumentError, match="differ in their number of rows:\n  x: 3 rows\n  y: 4 rows"):
        shuffled({"x": np.zeros(3), "y": np.zeros(4)})
    with pytest.raises(ArgumentError, match="batch=5 of 3 records: give more records or a smaller batch"):
        Batches(grain.MapDataset.source(ArrayRecords({"x": np.zeros(3)})), 5)


def test_fixed_batches_are_the_same_at_every_call():
    first, second = (fixed_batches(TOKENS, 4, 8, count=3) for _ in range(2))
    assert [b["inputs"].shape for b in first] == [(4, 8)] * 3
    assert all((a["targets"] == b["targets"]).all() for a, b in zip(first, second, strict=True))


MESH = md.Mesh(data=4, model=2)
EXAMPLE = {"x": md.named(jax.ShapeDtypeStruct((8, 4), jnp.float32), "batch embed"), "y": np.zeros(8, np.int32)}


def feed(batches):
    devices = device_mesh(MESH)
    layouts = {"x": "data=S(0) model=S(1)", "y": "model=S(0) data=S(0)"}
    places = [named_sharding(md.Layout.parse(text), 2 - i, devices) for i, text in enumerate(layouts.values())]
    return sharded_feed(batches, EXAMPLE, dict(zip(layouts, places)))


@pytest.mark.parametrize("repeated", [True, False])
def test_batches_lie_as_planned_and_have_the_names_of_the_step(repeated):
    arrays = {"x": np.arange(96, dtype=np.float32).reshape(24, 4), "y": np.arange(24, dtype=np.int32)}
    records = shuffled(arrays) if repeated else grain.MapDataset.source(ArrayRecords(arrays))
    got, expected = next(feed(Batches(records, 8))(1)), list(islice(Batches(records, 8), 2))[1]
    assert got["x"].dims == ("batch", "embed")
    np.testing.assert_array_equal(got["x"].array, expected["x"])
    np.testing.assert_array_equal(got["y"], expected["y"])
    assert got["x"].array.sharding.shard_shape((8, 4)) == (2, 2) and got["y"].sharding.shard_shape((8,)) == (1,)


def test_stacked_batches_lie_as_each_does(monkeypatch):
    arrays = {"x": np.arange(96, dtype=np.float32).reshape(24, 4), "y": np.arange(24, dtype=np.int32)}
    batches = Batches(ArrayRecords(arrays), 8)
    for processes in (1, 2):  # of which each makes the blocks of its devices
        monkeypatch.setattr(jax, "process_count", lambda n=processes: n)
        (count, (x, y)), (one, last) = feed(batches).stacked(0, [2, 1])
        assert (count, one) == (2, 1) and x.sharding.shard_shape(x.shape) == (2, 2, 2)
        np.testing.assert_array_equal(x, arrays["x"][:16].reshape(2, 8, 4))
        np.testing.assert_array_equal(y, arrays["y"][:16].reshape(2, 8))
        np.testing.assert_array_equal(last["y"], arrays["y"][16:])


def test_numbers_of_64_bits_are_taken_as_jax_takes_them():
    got = next(feed([{"x": np.ones((8, 4)), "y": np.arange(8)}])(0))
    assert (got["x"].array.dtype, got["y"].dtype) == (np.float32, np.int32)
    np.testing.assert_array_equal(got["y"], np.arange(8))


def test_a_batch_of_another_type():
    with pytest.raises(ArgumentError) as error:
        next(feed([{"x": np.zeros((8, 4), np.float16), "y": np.zeros(4, np.int32)}])(0))
    assert str(error.value) == (
        "a batch does not match the step's last argument:\n"
        "  ['x'].array: float16[8,4]; the step takes float32[8,4]\n"
        "  ['y']: int32[4]; the step takes int32[8]"
    )


def test_batches_may_share_one_buffer_and_are_read_ahead():
    asked = []

    def numbers():
        buffer = {"x": np.zeros((8, 4), np.float32), "y": np.zeros(8, np.int32)}
        for i in range(6):
            asked.append(i)
            buffer["y"][:] = i
            yield buffer

    with ReadAhead(feed(numbers())(0)) as batches:
        first = next(batches)
        while len(asked) < 4:  # two are ready, and one waits for room
            time.sleep(0.01)
        time.sleep(0.05)
        assert len(asked) == 4
        assert [int(batch["y"][0]) for batch in (first, *batches)] == list(range(6))
    with ReadAhead(iter([1, 2, 3, 4, 5, 6])) as batches:  # left early
        assert next(batches) == 1


def test_an_error_of_the_batches_is_raised_where_its_batch_would_be():
    def numbers():
        yield 1
        raise OSError("gone")

    with ReadAhead(numbers()) as batches:
        assert next(batches) == 1
        for _ in range(2):
            with pytest.raises(OSError, match="gone"):
                next(batches)


def test_which_items_are_the_last_ones_is_known_before_they_are_returned():
    with ReadAhead(at_least(iter(range(4)), 9), margin=2) as batches:
        batches.wait()
        assert batches.left == 3 and batches.failure is None
        assert (next(batches), next(batches), batches.left) == (0, 1, 2) and isinstance(batches.failure, BatchesEnded)
        assert (next(batches), next(batches), batches.left) == (2, 3, 0)
        with pytest.raises(BatchesEnded):
            next(batches)
    assert list(at_least(iter(range(4)), 4)) == [0, 1, 2, 3]


def test_a_margin_of_items_is_left_when_reading_fails():
    def numbers():
        yield from range(5)
        raise OSError("the disk is gone")

    left, failed = [], []
    batches = ReadAhead(numbers(), margin=2, fails=lambda: failed.append(len(left)))
    with pytest.raises(OSError, match="the disk is gone"), batches:
        for each in batches:
            left.append(each)
    assert left == [0, 1, 2, 3, 4] and len(failed) == 1 and failed[0] <= 3
    with ReadAhead(iter(range(5)), margin=2, fails=pytest.fail) as batches:
        assert [*batches] == [0, 1, 2, 3, 4] and batches.failure is None


def test_an_item_waits_for_those_that_may_be_needed_after_it():
    go_on = threading.Event()

    def numbers():
        yield from range(3)
        go_on.wait()
        yield from range(3, 9)

    with ReadAhead(numbers(), margin=2, stops=lambda: not go_on.is_set()) as batches:
        assert next(batches) == 0
        with pytest.raises(ReadingStopped):
            next(batches)
        go_on.set()
        assert [*batches] == [*range(1, 9)]


def test_batches_that_are_read_ahead_may_share_one_buffer():
    def batches():
        buffer = np.zeros(1)
        for number in range(6):
            buffer[:] = number
            yield {"x": buffer}

    with ReadAhead(host_feed(batches())(1)) as ahead:
        assert [float(batch["x"][0]) for batch in ahead] == [1, 2, 3, 4, 5]
