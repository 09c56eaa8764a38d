"""Tokens of the text, cached: run ``python -m meshdsl.training.data`` once to make them.

A byte-level BPE of 2,048 tokens is trained on the training works only, and both splits are
stored as one flat array of token ids each.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from meshdsl.training.archive import CACHE, refuse_missing
from meshdsl.training.corpus import ARCHIVE, COMMAND, split, works

VOCABULARY = 2048
Tokens = npt.NDArray[np.uint16]

_FILES = ("tokenizer.json", "train.npy", "held_out.npy")


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
    """A byte-level BPE with ``size`` tokens; every string can be encoded and comes back."""
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

    What a model reaches that knows how often each token occurs, and nothing of context.
    """
    counts = np.bincount(counts_of, minlength=vocabulary) + 1.0
    return float(-np.log(counts / counts.sum())[tokens].mean())


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog=COMMAND, description="Fetch and tokenize the training text.")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder to keep it in (default: %(default)s)")
    text = prepare(parser.parse_args().cache)
    entropy = unigram_entropy(text.held_out, text.held_out)
    print(f"{text.train.size:,} training tokens, {text.held_out.size:,} held out; unigram entropy {entropy:.3f} nats")


if __name__ == "__main__":
    main()
