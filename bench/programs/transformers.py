"""Language models: transformers in haiku, flax linen and equinox."""

import contextlib
import runpy
import sys
import tempfile
from functools import partial
from inspect import unwrap
from pathlib import Path
from typing import Any
from unittest import mock

import flax
import haiku as hk  # the installed one: the checkout has another
import jax
import jax.numpy as jnp
import numpy as np
import optax

from bench.programs.adapter import Adapter, Training
from bench.programs.nested import first_call

VOCABULARY = 50257  # of GPT-2


def _tokens(vocabulary: int, rows: int, length: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns random texts, and the same one token later."""
    text = np.random.default_rng(seed).integers(0, vocabulary, (rows, length + 1), dtype=np.int32)
    return text[:, :-1], text[:, 1:]


def _haiku_lm(size: str) -> Training:
    """``Updater.update`` with dropout and padding masks."""
    from examples.transformer import train

    vocabulary, width, heads, layers, rows, length = (128, 128, 2, 2, 16, 32)
    if size == "large":
        vocabulary, width, heads, layers, rows, length = (32000, 1024, 16, 6, 64, 1024)
    forward = hk.transform(train.build_forward_fn(vocabulary, width, heads, layers, 0.1))
    loss = partial(train.lm_loss_fn, forward.apply, vocabulary)
    optimizer = optax.chain(optax.clip_by_global_norm(0.25), optax.adam(2e-4, b1=0.9, b2=0.99))
    updater = train.Updater(forward.init, loss, optimizer)

    def batch(seed: int) -> dict[str, np.ndarray]:
        return dict(zip(("obs", "target"), _tokens(vocabulary, rows, length, seed), strict=True))

    def arguments() -> Any:
        return updater.init(jax.random.PRNGKey(428), batch(0)), batch(0)

    first = arguments() if size == "small" else jax.eval_shape(arguments)
    return Training(updater.update, first, {"data/*": 0}, lambda args, result, seed: (result[0], batch(seed)))


def _nanogpt(size: str) -> Training:
    """``train_step`` of the script ``train.py``, run with options of its own command line on random files."""
    from jax._src.array import ArrayImpl
    from jax._src.core import ShapedArray, aval_method

    ArrayImpl.split, ShapedArray.split = jnp.split, aval_method(jnp.split)
    flax.config.update("flax_return_frozendict", True)
    script = next(path for folder in sys.path if (path := Path(folder, "train.py")).is_file())
    options = {"batch_size": 16, "block_size": 32, "n_layer": 2, "n_head": 2, "n_embd": 64, "dropout": 0.1}
    options |= {"warmup_iters": 2, "lr_decay_iters": 20, "max_new_tokens": 2, "eval_iters": 1}

    def run() -> None:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            data = Path("data/shakespeare")
            data.mkdir(parents=True)
            for part in ("train.bin", "val.bin"):
                np.random.default_rng(0).integers(0, VOCABULARY, 1024, np.uint16).tofile(data / part)
            Path("configurator.py").symlink_to(script.parent / "configurator.py")
            with mock.patch("sys.argv", ["train.py", *(f"--{name}={value}" for name, value in options.items())]):
                runpy.run_path(str(script))

    step, (state, (first, _)) = first_call(run, "jax.jit", "train_step")
    rows, length = first.shape if size == "small" else (128, 1024)
    if size == "large":  # the script would evaluate the model first
        from model import GPT, GPTConfig

        model, config = GPT(GPTConfig(dropout=0.1)), unwrap(step).__globals__["config"]
        state = jax.eval_shape(lambda: model.create_state(**config))

    def batch(seed: int) -> Any:
        return _tokens(VOCABULARY, rows, length, seed)

    return Training(step, (state, batch(0)), {"batch/*": 0}, lambda args, result, seed: (result[1], batch(seed)))


def _equinox_gpt(size: str) -> Training:
    """``train_step`` of ``train``: a model whose leaves are arrays, functions and numbers."""
    import equinox as eqx
    from config import GPT_CONFIG
    from transformer.model import GPTModel
    from transformer.train import train

    rows, config = 64, dict(GPT_CONFIG["small"])
    if size == "small":
        rows = 16
        config |= {"vocab_size": 128, "context_length": 32, "emb_dim": 64, "n_heads": 2, "n_layers": 2}

    class Batches(list[Any]):
        batch_size = rows

    def batch(seed: int) -> Any:
        return tuple(jnp.asarray(x) for x in _tokens(config["vocab_size"], rows, config["context_length"], seed))

    found = {}

    def arguments() -> Any:
        model = GPTModel(config, jax.random.key(21))
        optimizer, batches = optax.adamw(learning_rate=0.0004, weight_decay=0.1), Batches([batch(0)])
        found["step"], args = first_call(
            lambda: train(model, optimizer, batches, batches, jax.random.key(1), 1), "equinox.filter_jit", "train_step"
        )
        return args

    def next_args(args: Any, result: Any, seed: int) -> Any:
        return *result[:2], *batch(seed), jax.random.split(jax.random.key(seed), rows)

    first = arguments() if size == "small" else eqx.filter_eval_shape(arguments)
    return Training(found["step"], first, {"x": 0, "y": 0, "keys": 0}, next_args)


HAIKU_LM = Adapter(
    "haiku: a GPT with dropout and padding masks",
    "deepmind/dm-haiku",
    "30b2cb5ce29ea13fc75087146658ec158c007c0a",
    _haiku_lm,
    "6 layers of 1024, 64 texts of 1024 tokens",
    changed=("`jax.jit` becomes `md.parallelize`",),
    stubs=("tensorflow", "tensorflow_datasets", "tensorflow_text"),
)

NANOGPT = Adapter(
    "nanoGPT in flax linen: TrainState, weight decay by parameter, a schedule",
    "cgarciae/nanoGPT-jax",
    "24fd60f987a946915e43c0000195bd73ddc34271",
    _nanogpt,
    "GPT-2 (124M), 128 texts of 1024 tokens",
    changed=("`jax.jit` becomes `md.parallelize`",),
    aged=("`x.split(3)` becomes `jnp.split(x, 3)`", "flax returns frozen parameters again (`flax_return_frozendict`)"),
    stubs=("orbax.checkpoint", "tiktoken"),
)

EQUINOX_GPT = Adapter(
    "equinox: GPT-2, a key per text, AdamW",
    "enerrio/jax-transformer",
    "65864e45089ec9cee031a22f0a26bfbf0065fe45",
    _equinox_gpt,
    "GPT-2 (124M), 64 texts of 256 tokens",
    changed=("`eqx.filter_jit` becomes `md.parallelize`",),
    stubs=("matplotlib", "tiktoken", "torch"),
)
