"""Labelled images: Fashion-MNIST where Debian has installed it, else scikit-learn's digits. Nothing is downloaded.

Pixels are standardised by the training images' mean and deviation. For training, ``Images.seen`` moves an image by a
pixel or two, and shows clothes also in mirror image.

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
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Images:
    """``images`` float32 ``[n, side, side, 1]`` and ``labels`` int32 ``[n]``, for training and held out.

    Args:
      mirrored: whether a mirror image shows the same class.
    """

    name: str
    train: Arrays
    held_out: Arrays
    mirrored: bool

    @property
    def side(self) -> int:
        """Pixels on a side."""
        return int(self.train["images"].shape[1])

    def seen(self, record: Arrays, rng: np.random.Generator) -> Arrays:
        """A record as training sees it this time: moved by up to a fourteenth of its side, perhaps mirrored."""
        image, most = record["images"], max(1, self.side // 14)
        if self.mirrored and rng.integers(2):
            image = image[:, ::-1]
        wide = np.pad(image, ((most, most), (most, most), (0, 0)), mode="edge")
        down, right = rng.integers(0, 2 * most + 1, 2)
        return {**record, "images": wide[down : down + self.side, right : right + self.side]}


def load(folder: Path = FOLDER) -> Images:
    """Fashion-MNIST if it is in ``folder``, else the digits."""
    files = [folder / f"{name}-ubyte.gz" for name in _FILES]
    if not all(file.exists() for file in files):
        return digits()
    pixels, labels, held, held_labels = map(_read, files)
    return _images("Fashion-MNIST", pixels, labels, held, held_labels, mirrored=True)


def digits() -> Images:
    """The digits."""
    from sklearn.datasets import load_digits  # slow to import

    pixels, labels = load_digits(return_X_y=True)
    cut, images = len(labels) - _DIGITS_HELD_OUT, pixels.reshape(-1, 8, 8)
    return _images("digits", images[:cut], labels[:cut], images[cut:], labels[cut:], mirrored=False)


def _images(
    name: str, pixels: np.ndarray, labels: np.ndarray, held: np.ndarray, held_labels: np.ndarray, mirrored: bool
) -> Images:
    mean, deviation = np.float32(pixels.mean()), np.float32(pixels.std())

    def arrays(pixels: np.ndarray, labels: np.ndarray) -> Arrays:
        images = (pixels[..., None].astype(np.float32) - mean) / deviation
        return {"images": images, "labels": labels.astype(np.int32)}

    return Images(name, arrays(pixels, labels), arrays(held, held_labels), mirrored)


def _read(file: Path) -> np.ndarray:
    """An array in LeCun's format: two zero bytes, type, rank, sizes as big-endian int32, then the bytes."""
    held = gzip.decompress(file.read_bytes())
    rank = held[3]
    shape = np.frombuffer(held, ">i4", rank, 4)
    return np.frombuffer(held, np.uint8, offset=4 + 4 * rank).reshape(shape)
