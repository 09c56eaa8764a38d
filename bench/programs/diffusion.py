"""Diffusion models in flax linen, for ``jax.pmap``: a transformer and a U-Net, each with averaged parameters."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bench.programs.adapter import Adapter, Training
from bench.programs.images import PMAP

TREE_MAP = "`jax.tree_map` becomes `jax.tree.map`"


def _dit(size: str) -> Training:
    """``DiffusionTrainer.update``, a method under ``jax.pmap``: noise is drawn from one key on all devices."""
    jax.tree_map = jax.tree.map
    import train_diffusion as program

    config, small = program.model_config.copy_and_resolve_references(), size == "small"
    published = {"patch_size": 2, "hidden_size": 768, "depth": 12, "num_heads": 16, "mlp_ratio": 4}
    config.update({"patch_size": 2, "hidden_size": 32, "num_classes": 16} if small else published)
    rows, pixels, channels = (16, 8, 4) if small else (512, 32, 4)  # latents of images of 256 x 256
    of_model = ("patch_size", "hidden_size", "depth", "num_heads", "mlp_ratio", "class_dropout_prob", "num_classes")
    model = program.DiT(**{name: config[name] for name in of_model})
    optimizer = optax.adam(config.lr, b1=config.beta1, b2=config.beta2)
    scheduler = program.GaussianDiffusion(config.diffusion_timesteps)

    def batch(seed: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(seed)
        images = rng.normal(size=(rows, pixels, pixels, channels)).astype(np.float32)
        return images, rng.integers(0, config.num_classes, rows, dtype=np.int32)

    def first() -> tuple[Any, ...]:
        keys = dict(zip(("params", "label_dropout"), jax.random.split(jax.random.PRNGKey(1)), strict=True))
        images, labels = batch(0)
        params = model.init(keys, images, jnp.zeros(rows), labels)["params"]
        state, averaged = program.TrainState.create(model, params, optimizer), program.TrainState.create(model, params)
        return program.DiffusionTrainer(jax.random.PRNGKey(0), state, averaged, config, scheduler), images, labels

    args = first() if size == "small" else jax.eval_shape(first)
    step = program.DiffusionTrainer.update
    return Training(step, args, {"images": 0, "labels": 0}, lambda _, result, i: (result[0], *batch(i)), "data")


DIT = Adapter(
    "flax linen: DiT, averaged parameters, step as a method",
    "kvfrans/jax-diffusion-transformer",
    "94ea6076bd934ba687ac23a165e57ed8110619af",
    _dit,
    "DiT-B/2, 512 latents of 32 x 32 x 4",
    changed=PMAP,
    aged=(TREE_MAP,),
    stubs=("wandb", "tensorflow", "tensorflow_datasets", "matplotlib", "utils.stable_vae", "utils.checkpoint"),
)


def _ddpm(size: str) -> Training:
    """``p_loss`` and ``apply_ema_decay`` of ``train.py``, each under ``jax.pmap``, as one step."""
    jax.tree_map = jax.tree.map
    import train
    import utils
    from configs import oxford102

    config = oxford102.get_config()
    if size == "small":
        config.data.batch_size, config.data.image_size, config.model.dim = 16, 16, 16
        config.model.dim_mults = (1, 2)
    shape = (config.data.batch_size, config.data.image_size, config.data.image_size, config.data.channels)
    parameters, loss = utils.get_ddpm_params(config.ddpm), train.get_loss_fn(config)
    options = {"self_condition": config.ddpm.self_condition, "is_pred_x0": config.ddpm.pred_x0}
    train_step = partial(train.p_loss, ddpm_params=parameters, loss_fn=loss, **options)

    def step(rngs: Any, state: Any, batch: Any) -> Any:
        state, metrics = train_step(rngs[0], state, batch)
        return train.apply_ema_decay(state, config.ema.beta), metrics

    def batch(seed: int) -> tuple[Any, Any]:
        images = np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)
        return jax.random.split(jax.random.PRNGKey(seed), 8), {"image": images}

    def first() -> tuple[Any, ...]:
        rngs, images = batch(0)
        return rngs, train.create_train_state(jax.random.PRNGKey(0), config), images

    def next_args(_: Any, result: Any, seed: int) -> tuple[Any, ...]:
        rngs, images = batch(seed)
        return rngs, result[0], images

    args = first() if size == "small" else jax.eval_shape(first)
    return Training(step, args, {"batch/*": 0, "rngs": 0}, next_args, "batch")


DDPM = Adapter(
    "flax linen: U-Net with attention, averaged parameters, one key per device",
    "yiyixuxu/denoising-diffusion-flax",
    "d09e2711ed77c734ed0f43004376314523bca6cc",
    _ddpm,
    "64 images of 128 x 128",
    changed=(*PMAP, "the average is taken in the same step", "a device's key is `rngs[0]`"),
    aged=(TREE_MAP,),
    folders=("denoising_diffusion_flax",),
    stubs=("clu", "wandb", "tensorflow", "tensorflow_datasets", "PIL"),
)
