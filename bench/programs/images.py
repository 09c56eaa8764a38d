"""Classification of images: ResNet and ViT in flax linen, for ``jax.pmap``."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bench.programs.adapter import Adapter, Training

PMAP = ("`jax.pmap` becomes `md.parallelize`", "state is not replicated", "batches are not reshaped to devices")


def _imagenet(scaled: bool, size: str) -> Training:
    """The step of ``examples/imagenet``, with batch statistics of each device averaged over devices."""
    import train
    from configs import default
    from flax.training.dynamic_scale import DynamicScale

    import models

    config = default.get_config()
    config.half_precision = scaled
    rows, pixels, name = (16, 32, "_ResNet1") if size == "small" else (config.batch_size, 224, config.model)
    model = train.create_model(model_cls=getattr(models, name), half_precision=config.half_precision)
    learning_rate = train.create_learning_rate_fn(config, 0.05, 10)

    def batch(seed: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        images = rng.normal(size=(rows, pixels, pixels, 3)).astype(np.float16 if scaled else np.float32)
        return {"image": images, "label": rng.integers(0, train.NUM_CLASSES, rows, dtype=np.int32)}

    def first() -> tuple[Any, ...]:
        state = train.create_train_state(jax.random.key(0), config, model, pixels, learning_rate)
        return state.replace(dynamic_scale=DynamicScale()) if scaled else state, batch(0)

    step = partial(train.train_step, learning_rate_fn=learning_rate)
    args = first() if size == "small" else jax.eval_shape(first)
    return Training(step, args, {"batch/*": 0}, lambda _, result, seed: (result[0], batch(seed)), "batch")


def _resnet(what: str, scaled: bool) -> Adapter:
    return Adapter(
        what,
        "google/flax",
        "18f8f311c275d57f46d95e41b15aa97b454754c0",
        partial(_imagenet, scaled),
        "ResNet-50, 128 images of 224 x 224",
        changed=PMAP,
        folders=("examples/imagenet",),
        stubs=("clu", "tensorflow", "tensorflow_datasets", "input_pipeline"),
    )


IMAGENET = _resnet("flax linen: ResNet, batch statistics", scaled=False)
IMAGENET_SCALED = _resnet("the same in float16, with dynamic loss scale", scaled=True)


def _vit(size: str) -> Training:
    """``update_fn`` of ``vit_jax/train.py``: accumulated gradients, clipped; momentum in bfloat16."""
    from vit_jax import models, train, utils
    from vit_jax.configs import common
    from vit_jax.configs import models as configs

    config = common.with_dataset(common.get_config(), "imagenet2012")
    if size == "small":
        architecture = configs.get_testing_config()
        architecture.unlock()
        architecture.hidden_size, architecture.transformer.mlp_dim, architecture.transformer.num_layers = 32, 64, 2
        rows, pixels, classes, accumulated = 32, 32, 16, 2
    else:
        architecture = configs.get_b16_config()
        rows, pixels, classes, accumulated = config.batch, config.pp.crop, 1000, config.accum_steps
    model = models.VisionTransformer(num_classes=classes, **architecture)
    schedule = utils.create_learning_rate_schedule(config.total_steps, config.base_lr, config.decay_type, 5)
    momentum = optax.sgd(schedule, momentum=0.9, accumulator_dtype=config.optim_dtype)
    optimizer = optax.chain(optax.clip_by_global_norm(config.grad_norm_clip), momentum)

    def batch(seed: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        images = rng.normal(size=(rows, pixels, pixels, 3)).astype(np.float32)
        return {"image": images, "label": np.eye(classes, dtype=np.float32)[rng.integers(0, classes, rows)]}

    def first() -> tuple[Any, ...]:
        key = jax.random.PRNGKey(0)
        params = model.init(key, jnp.ones((1, pixels, pixels, 3)), train=False)["params"]
        return params, optimizer.init(params), batch(0), key

    def next_args(_: Any, result: Any, seed: int) -> tuple[Any, ...]:
        params, state, _, key = result
        return params, state, batch(seed), key

    step = train.make_update_fn(apply_fn=model.apply, accum_steps=accumulated, tx=optimizer)
    args = first() if size == "small" else jax.eval_shape(first)
    return Training(step, args, {"batch/*": 0}, next_args, "batch")


VIT = Adapter(
    "flax linen: ViT, accumulated gradients, dropout by device",
    "google-research/vision_transformer",
    "c6de1e5378c9831a8477feb30994971bdc409e46",
    _vit,
    "ViT-B/16, 512 images of 384 x 384",
    changed=("`make_update_fn(...)` is wrapped in `md.parallelize`", *PMAP[1:]),
    stubs=(
        "clu",
        "tensorflow",
        "tensorflow_datasets",
        "pandas",
        "flaxformer",
        "vit_jax.input_pipeline",
        "vit_jax.preprocess",
    ),
)
