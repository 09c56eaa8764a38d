"""Gemma in flax NNX: model, optimizer, random streams and metrics are changed in place."""

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from bench.programs.adapter import Adapter, Training


def _gemma(size: str) -> Training:
    """``nnx_train_step`` of ``examples/gemma``, on examples packed into rows."""
    import train
    from configs import default, tiny
    from sow_lib import SowConfig
    from transformer import Transformer, TransformerConfig

    small = size == "small"
    config = (tiny if small else default).get_config()
    rows, length, words = (16, 16, 64) if small else (8 * config.per_device_batch_size, config.max_target_length, 35008)
    options = {"num_embed": words, "dtype": jnp.float32 if small else jnp.bfloat16}
    if small:
        sizes = {"num_layers": 2, "embed_dim": 32, "hidden_dim": 64, "head_dim": 8, "attention_types": (1, 1)}
        architecture = TransformerConfig.from_dict(**{**config.transformer_params, **sizes}, **options)
    else:
        architecture = TransformerConfig.from_version_name(config.transformer_name, **options)
    schedule = train.create_learning_rate_schedule(config.learning_rate, 5 if small else config.warmup_steps)
    optimizer = optax.adamw(schedule, b1=0.9, b2=0.98, eps=1e-9, weight_decay=config.weight_decay)

    def batch(seed: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        text = rng.integers(1, words, (rows, length + 1), dtype=np.int32)
        text[:, -2:] = 0  # padding
        first, second = np.arange(length // 2), np.arange(length - length // 2)
        packed = {
            "inputs_position": np.concatenate([first, second]),
            "inputs_segmentation": np.arange(length) // len(first),
        }
        spread = {name: np.tile(x.astype(np.int32), (rows, 1)) for name, x in packed.items()}
        return {"inputs": text[:, :-1], "targets": text[:, 1:], **spread}

    def objects() -> tuple[Any, ...]:
        rngs = nnx.Rngs(params=0, dropout=0)
        model = Transformer(architecture, rngs=rngs, sow_config=SowConfig(**config.sow_config))
        metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())
        return model, nnx.Optimizer(model, tx=optimizer, wrt=nnx.Param), rngs, metrics

    def next_args(args: tuple[Any, ...], _: Any, seed: int) -> tuple[Any, ...]:
        return (*args[:3], batch(seed), args[4])

    step = partial(train.nnx_train_step, label_smoothing=0.0, pad_id=0, with_capture=config.sow_config is not None)
    model, state, rngs, metrics = objects() if small else nnx.eval_shape(objects)
    return Training(step, (model, state, rngs, batch(0), metrics), {"batch/*": 0}, next_args)


GEMMA = Adapter(
    "flax NNX: Gemma, everything changed in place",
    "google/flax",
    "18f8f311c275d57f46d95e41b15aa97b454754c0",
    _gemma,
    "Gemma 3 1B, 256 rows of 128 words",
    changed=("`nnx.jit` becomes `md.parallelize`", "`shd_config` is left out", "`jax.set_mesh` is left out"),
    folders=("examples/gemma",),
    stubs=("clu", "grain", "sentencepiece", "tensorflow", "tensorflow_datasets", "input_pipeline", "tokenizer"),
)
