"""Tables of numbers, categories and a label, split into training and held-out rows.

dense   float32 [row, numbers]     each with mean 0 and deviation 1 over the training rows, 0 where unknown
sparse  int32   [row, categories]  numbered from 1 in the order of the training rows' values, 0 for others
labels  float32 [row]              0 or 1
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
_ARRAYS = ("dense", "sparse", "labels")
_PARTS = ("train", "held_out")


@dataclass(frozen=True)
class FeatureTable:
    """Arrays by name for training and held out, and the number of values of each column of ``sparse``."""

    train: Arrays
    held_out: Arrays
    features: tuple[int, ...]


def make_table(
    numbers: np.ndarray, categories: Sequence[Sequence[str]], labels: np.ndarray, held_out: np.ndarray
) -> FeatureTable:
    """The table of rows.

    Args:
      numbers: ``[row, numbers]``, nan where unknown.
      categories: per row, the values of its categories.
      labels: bool ``[row]``.
      held_out: bool ``[row]``, the rows that are held out.
    """
    columns = [_numbered(values, held_out) for values in zip(*categories, strict=True)]
    arrays = {
        "dense": _scaled(numbers, held_out).astype(np.float32),
        "sparse": np.stack([column for column, _ in columns], axis=1).astype(np.int32),
        "labels": labels.astype(np.float32),
    }
    train, held = ({name: array[chosen] for name, array in arrays.items()} for chosen in (~held_out, held_out))
    return FeatureTable(train, held, tuple(count for _, count in columns))


def save_table(table: FeatureTable, file: Path) -> None:
    """Writes the table to a file for ``load_table``."""
    parts = zip(_PARTS, (table.train, table.held_out), strict=True)
    arrays: dict[str, Any] = {f"{part}/{name}": array for part, arrays in parts for name, array in arrays.items()}
    np.savez(file, features=np.array(table.features), **arrays)


def load_table(file: Path) -> FeatureTable:
    """Reads the table that ``save_table`` wrote."""
    with np.load(file) as saved:
        train, held_out = ({name: saved[f"{part}/{name}"] for name in _ARRAYS} for part in _PARTS)
        return FeatureTable(train, held_out, tuple(saved["features"].tolist()))


def _numbered(values: Sequence[str], held_out: np.ndarray) -> tuple[np.ndarray, int]:
    """Values as numbers, those of the training rows from 1 and others 0, and the count of numbers."""
    known = sorted({value for value, out in zip(values, held_out, strict=True) if not out})
    number = {value: i for i, value in enumerate(known, start=1)}
    return np.array([number.get(value, 0) for value in values]), len(known) + 1


def _scaled(numbers: np.ndarray, held_out: np.ndarray) -> np.ndarray:
    """Each column with mean 0 and deviation 1 over the training rows (if it varies), 0 where it is unknown."""
    known = numbers[~held_out]
    mean, deviation = np.nanmean(known, axis=0), np.nanstd(known, axis=0)
    scaled: np.ndarray = np.nan_to_num((numbers - mean) / np.where(deviation == 0, 1, deviation))
    return scaled
