"""Labelled images: Fashion-MNIST where Debian has installed it, else scikit-learn's digits. Nothing is downloaded.

Pixels are standardised by the mean and deviation of the training images. Since the digits are few, they are shifted at
random by a pixel in every epoch.

``apt-get install dataset-fashion-mnist`` brings 60,000 + 10,000 pictures of clothes, 28 by 28 pixels in ten classes
(Xiao et al. 2017; MIT licence). Without it there are 1,797 scanned digits, 8 by 8, of which the last 357 are held out.
"""

import gzip
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from meshdsl.training.batches import ArrayRecords, ShuffledRecords

FOLDER = Path("/usr/share/datasets/fashion-mnist")
CLASSES = 10
_AUGMENTED_BELOW = 10_000  # training images below which each is shifted at random
_FILES = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
_DIGITS_HELD_OUT = 357
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Images:
    """``images`` float32 ``[n, side, side, 1]`` and ``labels`` int32 ``[n]``, for training and held out."""

    name: str
    train: Arrays
    held_out: Arrays

    @property
    def side(self) -> int:
        """Pixels on a side."""
        return int(self.train["images"].shape[1])

    def records(self) -> ShuffledRecords:
        """The training records without end, shuffled; if they are few, each is shifted at random by up to a pixel."""
        few = len(self.train["labels"]) < _AUGMENTED_BELOW
        return ShuffledRecords(ArrayRecords(self.train), change=shift_images if few else None)


def shift_images(batch: Arrays, positions: np.ndarray, epoch: int) -> Arrays:
    """Records with each image shifted by up to a pixel in both directions, anew in every epoch; edges are repeated."""
    images = batch["images"]
    moves = _moves(epoch)[positions]
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="edge")
    number = np.arange(len(images))[:, None, None]
    down, right = (move[:, None] + np.arange(size) for move, size in zip(moves.T, images.shape[1:3], strict=True))
    return {**batch, "images": padded[number, down[:, :, None], right[:, None, :]]}


@lru_cache(maxsize=2)
def _moves(epoch: int) -> np.ndarray:
    """Rows and columns by which to shift the image at each position, from 0 to 2."""
    return np.random.default_rng((epoch, 1)).integers(0, 3, (_AUGMENTED_BELOW, 2))


def load(folder: Path = FOLDER) -> Images:
    """Fashion-MNIST if it is in ``folder``, else the digits."""
    files = [folder / f"{name}-ubyte.gz" for name in _FILES]
    if not all(file.exists() for file in files):
        return digits()
    pixels, labels, held, held_labels = map(_read, files)
    return _images("Fashion-MNIST", pixels, labels, held, held_labels)


def digits() -> Images:
    """The digits."""
    from sklearn.datasets import load_digits  # slow to import

    pixels, labels = load_digits(return_X_y=True)
    cut, images = len(labels) - _DIGITS_HELD_OUT, pixels.reshape(-1, 8, 8)
    return _images("digits", images[:cut], labels[:cut], images[cut:], labels[cut:])


def _images(name: str, pixels: np.ndarray, labels: np.ndarray, held: np.ndarray, held_labels: np.ndarray) -> Images:
    mean, deviation = np.float32(pixels.mean()), np.float32(pixels.std())

    def arrays(pixels: np.ndarray, labels: np.ndarray) -> Arrays:
        images = (pixels[..., None].astype(np.float32) - mean) / deviation
        return {"images": images, "labels": labels.astype(np.int32)}

    return Images(name, arrays(pixels, labels), arrays(held, held_labels))


def _read(file: Path) -> np.ndarray:
    """An array in LeCun's format: two zero bytes, type, rank, sizes as big-endian int32, then the bytes."""
    held = gzip.decompress(file.read_bytes())
    rank = held[3]
    shape = np.frombuffer(held, ">i4", rank, 4)
    return np.frombuffer(held, np.uint8, offset=4 + 4 * rank).reshape(shape)
