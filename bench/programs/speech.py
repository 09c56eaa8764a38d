"""Speech recognition in flax linen: the Conformer of AlgoPerf, trained by its NAdamW submission."""

from collections import namedtuple
from functools import partial
from typing import Any

import jax
import numpy as np

from bench.programs.adapter import Adapter, Training

# as published in the study of the submission
HYPERPARAMETERS = {
    "learning_rate": 0.001308209823469072,
    "one_minus_beta1": 0.02686663061,
    "beta2": 0.9981232922116359,
    "weight_decay": 0.16375311233774334,
    "warmup_factor": 0.1,
}


def _conformer(size: str) -> Training:
    """``train_step`` of the submission: spectrogram, masks drawn by step, batch norm over valid frames, CTC loss."""
    from algoperf.workloads.librispeech_conformer.librispeech_jax import models, workload
    from algorithms.baselines.external_tuning import jax_nadamw_full_budget as submission

    small = size == "small"
    rows, samples, letters = (16, 16000, 8) if small else (256, 320000, 256)
    if small:
        sizes = {"vocab_size": 32, "encoder_dim": 32, "num_attention_heads": 4, "num_encoder_layers": 2}
        models.ConformerConfig = partial(models.ConformerConfig, **sizes)
    speech = workload.LibriSpeechConformerWorkload()
    hyperparameters = namedtuple("Hyperparameters", HYPERPARAMETERS)(**HYPERPARAMETERS)
    step = partial(submission.train_step, speech)

    def batch(seed: int) -> dict[str, Any]:
        rng = np.random.default_rng(seed)
        sound, words = rng.normal(size=(rows, samples)).astype(np.float32), rng.integers(1, 32, (rows, letters))
        lengths, letter = rng.integers(samples // 2, samples, rows), rng.integers(letters // 2, letters, rows)
        silent = np.arange(samples) >= lengths[:, None]
        return {
            "inputs": (sound * ~silent, silent.astype(np.float32)),
            "targets": (words.astype(np.int32), (np.arange(letters) >= letter[:, None]).astype(np.float32)),
        }

    found = {}

    def first() -> tuple[Any, ...]:
        params, averages = speech.init_model_fn(jax.random.PRNGKey(0))
        state, found["update"] = submission.init_optimizer_state(speech, params, averages, hyperparameters, None)
        return averages, state, params, batch(0), jax.random.PRNGKey(1)

    def next_args(args: tuple[Any, ...], result: Any, seed: int) -> tuple[Any, ...]:
        state, params, averages, *_ = result
        return averages, state, params, batch(seed), jax.random.fold_in(args[4], seed)

    args = first() if small else jax.eval_shape(first)

    def train_step(model_state: Any, optimizer_state: Any, params: Any, batch: Any, rng: Any) -> Any:
        return step(found["update"], model_state, optimizer_state, params, batch, rng, 5.0, 0.0, 0.1)

    return Training(train_step, args, {"batch/**": 0}, next_args)


CONFORMER = Adapter(
    "flax linen: Conformer on sound, CTC loss, NAdamW",
    "mlcommons/algorithmic-efficiency",
    "2c90454fc05d5bdf3598b0c7651e611f132a7060",
    _conformer,
    "AlgoPerf's Conformer, 256 recordings of 20 s",
    changed=("`jax.jit` with `in_shardings` and `out_shardings` becomes `md.parallelize` with the batch's pin",),
    stubs=("clu", "torch", "tensorflow", "tensorflow_text", "algoperf._version"),
)
