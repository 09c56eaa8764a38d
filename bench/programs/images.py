"""Classification of images: ResNet in flax linen."""

from typing import Any

import jax
import numpy as np

from bench.programs.adapter import Adapter, Training


def _imagenet(size: str, scaled: bool) -> Training:
    """The step of ``examples/imagenet``, with batch statistics of each device averaged over devices."""
    import ml_collections
    import train
    from configs import default
    from flax.training.dynamic_scale import DynamicScale

    import models

    config: ml_collections.ConfigDict = default.get_config()
    config.half_precision = scaled
    rows, pixels, name = (16, 32, "_ResNet1") if size == "small" else (128, 224, config.model)
    model = train.create_model(model_cls=getattr(models, name), half_precision=config.half_precision)
    learning_rate = train.create_learning_rate_fn(config, 0.05, 10)

    def create() -> Any:
        state = train.create_train_state(jax.random.key(0), config, model, pixels, learning_rate)
        return state.replace(dynamic_scale=DynamicScale()) if scaled else state

    def batch(seed: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        images = rng.normal(size=(rows, pixels, pixels, 3)).astype(np.float16 if scaled else np.float32)
        return {"image": images, "label": rng.integers(0, train.NUM_CLASSES, rows, dtype=np.int32)}

    def step(state: Any, batch: Any) -> Any:
        return train.train_step(state, batch, learning_rate_fn=learning_rate)

    first = (create(), batch(0)) if size == "small" else jax.eval_shape(lambda: (create(), batch(0)))
    return Training(step, first, {"batch/*": 0}, lambda args, result, seed: (result[0], batch(seed)), "batch")


IMAGENET = Adapter(
    "flax linen: ResNet, batch statistics, pmap",
    "google/flax",
    "18f8f311c275d57f46d95e41b15aa97b454754c0",
    lambda size: _imagenet(size, scaled=False),
    "ResNet-50, 128 images of 224 x 224",
    changed=("`jax.pmap` is `md.parallelize`", "the state is not replicated", "batches are not reshaped to devices"),
    folders=("examples/imagenet",),
    stubs=("clu", "tensorflow", "tensorflow_datasets", "input_pipeline"),
)
