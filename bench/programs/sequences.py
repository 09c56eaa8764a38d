"""State space models of long sequences: S4."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import flax
import jax
import numpy as np

from bench.programs.adapter import Adapter, Training


def _s4(size: str) -> Training:
    """``train_step`` on images as sequences of pixels: complex kernels, FFTs, learning rates by parameter."""
    jax.tree_leaves = jax.tree.leaves
    flax.config.update("flax_return_frozendict", True)
    from s4 import train

    rows, length, width, states, layers = (16, 32, 16, 8, 2) if size == "small" else (64, 4096, 512, 64, 6)
    layer = train.Models["s4"]
    options = {"d_output": 256, "d_model": width, "n_layers": layers, "dropout": 0.1}
    model = partial(
        train.BatchStackedModel, layer_cls=layer, layer=flax.core.freeze({"N": states, "l_max": length}), **options
    )

    def batch(seed: int) -> tuple[np.ndarray, np.ndarray]:
        pixels = np.random.default_rng(seed).integers(0, 256, (rows, length, 1))
        return pixels.astype(np.float32), np.zeros(rows, np.int32)

    def arguments() -> Any:
        loader = [[SimpleNamespace(numpy=lambda: batch(0)[0])]]
        rates = {"lr": 1e-3, "lr_layer": layer.lr, "lr_schedule": True, "weight_decay": 0.05, "total_steps": 1000}
        state = train.create_train_state(jax.random.PRNGKey(0), model, loader, **rates)
        return state, jax.random.PRNGKey(1), *batch(0)

    first = arguments() if size == "small" else jax.eval_shape(arguments)
    return Training(
        partial(train.train_step, model=model(training=True), classification=False),
        first,
        {"batch_inputs": 0, "batch_labels": 0},
        lambda args, result, seed: (result[0], jax.random.PRNGKey(seed), *batch(seed)),
    )


S4 = Adapter(
    "S4 in flax linen: complex state spaces, FFTs, learning rates by parameter",
    "srush/annotated-s4",
    "f19e2464990f0c07943bb922894d6f2af65c9bd9",
    _s4,
    "6 layers of 512, 64 states, 64 sequences of 4096",
    changed=("`jax.jit` becomes `md.parallelize`",),
    aged=(
        "`jax.tree_leaves` becomes `jax.tree.leaves`",
        "flax returns frozen parameters again (`flax_return_frozendict`)",
    ),
    stubs=("celluloid", "hydra", "matplotlib", "omegaconf", "s4.data", "seaborn", "torch", "tqdm", "wandb"),
)
