"""Images, flights and ratings."""

import gzip
from dataclasses import replace

import numpy as np
import pytest

from meshdsl.training.batches import shuffled
from meshdsl.training.datasets import flights, images, movies
from meshdsl.training.datasets.archive import DataError


def flight(day, plane, delay, hour="5"):
    return {"year": "2013", "month": "1", "day": str(day), "carrier": "UA", "tailnum": plane, "flight": "7"} | {
        **{"origin": "EWR", "dest": "IAH", "hour": hour, "minute": "15", "distance": str(100 * day)},
        "arr_delay": str(delay),
    }


def weather(day, temp):
    return {"origin": "EWR", "month": "1", "day": str(day), "hour": "5", "temp": temp} | dict.fromkeys(
        ("dewp", "humid", "wind_speed", "precip", "pressure", "visib"), str(day)
    )


def test_rows_become_arrays_with_the_scales_of_the_training_days():
    rows = [flight(1, "N1", 14), flight(3, "N2", 15), flight(5, "N1", 90), flight(10, "N3", -2, hour="6")]
    made = flights.encode(rows, [weather(1, "10"), weather(3, "30"), weather(5, "40"), weather(10, "50")])
    np.testing.assert_array_equal(made.train["labels"], [0, 1])
    np.testing.assert_array_equal(made.held_out["labels"], [1, 0])
    assert made.features == (2, 3, 2, 2, 2, 2, 3, 2)
    np.testing.assert_array_equal(made.train["sparse"][:, 1], [1, 2])
    np.testing.assert_array_equal(made.held_out["sparse"][:, 1], [1, 0])  # N3 is not known
    np.testing.assert_array_equal(made.train["dense"][:, 2:4], [[-1, -1], [1, 1]])  # distance, temperature
    np.testing.assert_array_equal(made.held_out["dense"][:, 2:4], [[3, 2], [8, 0]])  # no weather at that hour


def test_flights_are_all_that_arrived_and_whole_days_are_held_out():
    made = flights.load()
    sizes = [len(part["labels"]) for part in (made.train, made.held_out)]
    assert sizes == [262_242, 65_104]
    assert (made.train["sparse"].max(0) + 1 == made.features).all() and made.train["sparse"].min() == 1
    assert (made.held_out["sparse"] < made.features).all() and made.held_out["sparse"].min() == 0
    assert 0.24 < made.train["labels"].mean() < made.held_out["labels"].mean() < 0.25


def test_without_the_cache_the_message_names_the_command(tmp_path):
    with pytest.raises(DataError) as error:
        flights.load(tmp_path)
    assert str(error.value) == (
        f"no flights.npz in {tmp_path}\n"
        f"fetch the flights once: python -m meshdsl.training.datasets.flights --cache {tmp_path}"
    )


def test_ratings_meet_their_person_and_film():
    people = [{"user_id": "7", "age": "20", "gender": "F", "occupation": "other"}]
    people += [{"user_id": "8", "age": "40", "gender": "M", "occupation": "none"}]
    films = [{"item_id": "1", "release_year": "1995", "class": "Comedy Drama"}]
    films += [{"item_id": "2", "release_year": "", "class": "Action"}]
    given = [("8", "2", "5.0"), ("7", "1", "4"), ("8", "1", "3"), ("7", "2", "1"), ("8", "2", "4"), ("7", "1", "2")]
    ratings = [dict(zip(("user_id", "item_id", "rating"), row)) for row in given]
    made = movies.encode(ratings, people, films)
    np.testing.assert_array_equal(made.train["labels"], [1, 0, 0, 1])
    np.testing.assert_array_equal(made.held_out["labels"], [1, 0])  # every fifth, from the first
    np.testing.assert_array_equal(
        made.train["sparse"][:, :5], [[1, 1, 1, 2, 2], [2, 1, 2, 1, 2], [1, 2, 1, 2, 1], [2, 2, 2, 1, 1]]
    )
    np.testing.assert_array_equal(made.train["dense"], [[-1, 0], [1, 0], [-1, 0], [1, 0]])
    assert made.features == (3, 3, 3, 3, 3, 3)


def test_there_are_a_hundred_thousand_ratings():
    made = movies.load()
    assert [len(part["labels"]) for part in (made.train, made.held_out)] == [80_000, 20_000]
    assert 0.55 < made.train["labels"].mean() < 0.56
    assert made.features[0] == 944 and (made.held_out["sparse"] < made.features).all()


def test_images_are_read_as_they_were_written(tmp_path):
    def write(name, array):
        head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
        (tmp_path / f"{name}-ubyte.gz").write_bytes(gzip.compress(head + array.tobytes()))

    pixels, labels = np.arange(36, dtype=np.uint8).reshape(4, 3, 3), np.arange(4, dtype=np.uint8)
    for part in ("train", "t10k"):
        write(f"{part}-images-idx3", pixels)
        write(f"{part}-labels-idx1", labels)
    made = images.load(tmp_path)
    assert (made.name, made.side) == ("Fashion-MNIST", 3)
    standard = (pixels - pixels.mean()) / pixels.std()
    np.testing.assert_allclose(made.train["images"][..., 0], standard, rtol=1e-5)
    np.testing.assert_allclose(made.held_out["images"][..., 0], standard, rtol=1e-5)
    np.testing.assert_array_equal(made.held_out["labels"], labels)


def test_without_fashion_mnist_there_are_digits(tmp_path):
    made = images.load(tmp_path)
    assert made.name == "digits"
    assert made.train["images"].shape == (1440, 8, 8, 1) and made.held_out["labels"].shape == (357,)
    assert made.train["images"].dtype == np.float32 and abs(made.train["images"].mean()) < 1e-5


def test_few_images_are_seen_moved(tmp_path):
    image = np.zeros((8, 8, 1), np.float32)
    image[3, 4] = 1
    several = {"images": np.repeat(image[None], 100, 0), "labels": np.full(100, 3)}
    shifted = images.shift_images(several, np.arange(100), epoch=0)
    assert shifted["images"].shape == several["images"].shape and (shifted["labels"] == 3).all()
    assert (shifted["images"] != images.shift_images(several, np.arange(100), epoch=1)["images"]).any()
    seen = [{"images": x} for x in shifted["images"]]
    places = {tuple(np.argwhere(x["images"][..., 0])[0]) for x in seen}
    assert places == {(row, column) for row in range(2, 5) for column in range(3, 6)}
    few = images.load(tmp_path)
    many = replace(few, train={name: np.resize(x, (10_000, *x.shape[1:])) for name, x in few.train.items()})
    for made, same in ((few, False), (many, True)):
        plain = shuffled(made.train)
        seen, unchanged = (records.take(np.arange(20))["images"] for records in (made.records(), plain))
        assert (seen == unchanged).all() == same
