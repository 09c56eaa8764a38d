"""Labelled images: Fashion-MNIST where Debian has installed it, else scikit-learn's digits. Nothing is downloaded.

``apt-get install dataset-fashion-mnist`` brings 60,000 + 10,000 pictures of clothes, 28 by 28 pixels in ten classes
(Xiao et al. 2017; MIT licence). Without it there are 1,797 scanned digits, 8 by 8, of which the last 357 are held out.
"""

import gzip
from dataclasses import dataclass
from pathlib import Path

import numpy as np

FOLDER = Path("/usr/share/datasets/fashion-mnist")
CLASSES = 10

_FILES = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
_DIGITS_HELD_OUT = 357
_WHITE = np.float32(255)
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Images:
    """``images`` float32 ``[n, side, side, 1]`` from 0 to 1 and ``labels`` int32 ``[n]``, for training and held out."""

    name: str
    train: Arrays
    held_out: Arrays

    @property
    def side(self) -> int:
        """Pixels on a side."""
        return int(self.train["images"].shape[1])


def load(folder: Path = FOLDER) -> Images:
    """Fashion-MNIST if it is in ``folder``, else the digits."""
    files = [folder / f"{name}-ubyte.gz" for name in _FILES]
    if not all(file.exists() for file in files):
        return _digits()
    images, labels, held_images, held_labels = map(_read, files)
    return Images("Fashion-MNIST", _arrays(images / _WHITE, labels), _arrays(held_images / _WHITE, held_labels))


def _digits() -> Images:
    from sklearn.datasets import load_digits  # slow to import

    pixels, labels = load_digits(return_X_y=True)
    cut = len(labels) - _DIGITS_HELD_OUT
    images = pixels.reshape(-1, 8, 8) / 16
    return Images("digits", _arrays(images[:cut], labels[:cut]), _arrays(images[cut:], labels[cut:]))


def _arrays(images: np.ndarray, labels: np.ndarray) -> Arrays:
    return {"images": images[..., None].astype(np.float32), "labels": labels.astype(np.int32)}


def _read(file: Path) -> np.ndarray:
    """An array in LeCun's format: two zero bytes, type, rank, sizes as big-endian int32, then the bytes."""
    held = gzip.decompress(file.read_bytes())
    rank = held[3]
    shape = np.frombuffer(held, ">i4", rank, 4)
    return np.frombuffer(held, np.uint8, offset=4 + 4 * rank).reshape(shape)
