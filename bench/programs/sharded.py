"""Programs that state shardings themselves, by logical axes or rules: their own jitted step, at its first call.

``build`` of their adapters runs the author's training up to that call, and returns what a function makes of the step
there, where the author's mesh and rules are in effect.
"""

from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from bench.programs.adapter import Adapter
from bench.programs.nested import at_first_call

Use = Callable[[Any, tuple[Any, ...]], Any]


def _at_call(train: Callable[[], Any], compile_with: str, name: str, use: Use) -> Any:
    return at_first_call(train, compile_with, name, lambda _, jitted, args: use(jitted(), args))


def _lm1b(size: str, use: Use) -> Any:
    """``train_step`` of ``examples/lm1b``: logical axes over data, fsdp and tensor."""
    import train
    from configs import default

    config = default.get_config()
    config.ici_fsdp_parallelism, config.ici_tensor_parallelism, config.ici_data_parallelism = 2, 2, 2
    config.dcn_data_parallelism, config.restore_checkpoints = 1, False
    if size == "small":
        config.emb_dim, config.qkv_dim, config.mlp_dim, config.num_heads, config.num_layers = 128, 128, 512, 4, 2
        config.max_target_length = config.max_eval_target_length = 64
    rows, words = 8 * config.per_device_batch_size, config.vocab_size
    text = np.random.default_rng(0).integers(1, words, (rows, config.max_target_length), dtype=np.int32)
    encoder = SimpleNamespace(
        vocab_size=lambda: words, tokenize=lambda text: SimpleNamespace(numpy=lambda: np.arange(len(text)))
    )
    batches = [{"inputs": text}]
    with mock.patch("train.input_pipeline.get_datasets", lambda **_: (batches, batches, None, encoder), create=True):
        return _at_call(lambda: train.train_and_evaluate(config, "."), "jax.jit", "train_step", use)


LM1B = Adapter(
    "flax linen: a language model, logical axes over data, fsdp and tensor",
    "google/flax",
    "18f8f311c275d57f46d95e41b15aa97b454754c0",
    _lm1b,
    "6 layers of 512, 256 texts of 128 words",
    folders=("examples/lm1b",),
    stubs=("clu", "tensorflow", "tensorflow_datasets", "input_pipeline", "sentencepiece"),
)


def _flags() -> Any:
    """A stand-in for ``mlxu``, of which the program uses the declaration of its options and the writer of logs."""
    logger = mock.MagicMock()
    return SimpleNamespace(
        config_dict=lambda **values: ConfigDict(values),
        config_placeholder=lambda kind: None,
        update_config_dict=lambda config, updates: ConfigDict({**config, **(updates or {})}),
        define_flags_with_default=lambda **values: (SimpleNamespace(**values), values),
        get_user_flags=lambda flags, declared: {},
        user_flags_to_config_dict=lambda flags, declared: ConfigDict(),
        WandBLogger=logger,
        run=None,
    )


def _easylm(size: str, use: Use) -> Any:
    """``train_step`` of ``llama_train.py``, under ``pjit`` with partition rules over dp, fsdp and mp."""
    rows, length = (32, 64) if size == "small" else (64, 2048)
    text = np.random.default_rng(0).integers(0, 32000, (rows, length), dtype=np.int32)
    batch = {"input_tokens": text, "target_tokens": text, "loss_masks": np.ones((rows, length), np.float32)}

    class Batches(list[Any]):
        seq_length, tokenizer = length, None

    with ExitStack() as patches:
        patches.enter_context(mock.patch.dict("sys.modules", {"mlxu": _flags()}))
        from EasyLM.models.llama import llama_train

        llama_train.FLAGS.mesh_dim = "1,4,2"
        llama_train.FLAGS.llama = ConfigDict({"base_model": "debug" if size == "small" else "llama_1b"})
        for name in ("AutoTokenizer", "StreamingCheckpointer"):
            patches.enter_context(mock.patch.object(llama_train, name))
        data = patches.enter_context(mock.patch.object(llama_train, "DatasetFactory"))
        data.load_dataset = lambda *_: Batches([(batch, {})])
        clip = jnp.clip
        patches.enter_context(mock.patch.object(jnp, "clip", lambda x, *ends, a_min=None: clip(x, *ends or (a_min,))))
        patches.enter_context(mock.patch.object(llama_train, "trange", lambda first, last, **_: range(first, last)))
        return _at_call(lambda: llama_train.main([]), f"{llama_train.__name__}.pjit", "train_step", use)


EASYLM = Adapter(
    "EasyLM: Llama under pjit, partition rules over dp, fsdp and mp",
    "young-geng/EasyLM",
    "fe5b2c354e25d697fce7cd225e23bbbe72570da3",
    _easylm,
    "Llama of 1B, 64 texts of 2048 tokens",
    aged=("`a_min` of `jnp.clip` becomes `min`",),
    stubs=("gcsfs", "datasets", "EasyLM.data", "EasyLM.checkpoint"),
)


def _big_vision(size: str, use: Use) -> Any:
    """``update_fn`` of ``train.py``: ViT-S/16, its rule for fully sharded parameters."""
    import big_vision.train as program
    from big_vision.configs.vit_s16_i1k import get_config

    config, small = get_config(), size == "small"
    config.unlock()
    del config.total_epochs
    config.mixup, config.evals, config.total_steps, config.pp_modules = None, ConfigDict(), 100_000, []
    config.sharding_strategy = [(".*", f'fsdp(axis="data", min_size_to_shard_mb={0 if small else 4})')]
    rows, pixels = (32, 32) if small else (config.input.batch_size, 224)
    if small:
        config.input.batch_size, config.num_classes, config.model.variant = rows, 16, "mu/16"
    rng = np.random.default_rng(0)
    labels = np.eye(config.num_classes, dtype=np.float32)[rng.integers(0, config.num_classes, rows)]
    batch = {"image": rng.normal(size=(rows, pixels, pixels, 3)).astype(np.float32), "labels": labels}

    def shape(x: Any) -> Any:
        return SimpleNamespace(shape=x.shape, dtype=SimpleNamespace(as_numpy_dtype=x.dtype))

    def placed(data: Any, devices: Any, _: int) -> Any:
        at = jax.NamedSharding(jax.sharding.Mesh(devices, ("data",)), jax.P("data"))
        return iter([jax.device_put(batch, at)])

    with ExitStack() as patches:
        source = SimpleNamespace(element_spec={name: shape(x) for name, x in batch.items()})
        patches.enter_context(mock.patch.object(program, "input_pipeline", create=True))
        patches.enter_context(mock.patch.object(program, "eval_common", SimpleNamespace(from_config=lambda *_: [])))
        program.input_pipeline.training = lambda _: (source, 1000)
        program.input_pipeline.start_global = placed
        patches.enter_context(mock.patch.object(program.flags, "FLAGS", SimpleNamespace(config=config, workdir=None)))
        patches.callback(jax.config.update, "jax_transfer_guard", "allow")
        return _at_call(lambda: program.main([]), "jax.jit", "update_fn", use)


BIG_VISION = Adapter(
    "big_vision: ViT, its rule for fully sharded parameters",
    "google-research/big_vision",
    "0127fb6b337ee2a27bf4e54dea79cff176527356",
    _big_vision,
    "ViT-S/16, 1024 images of 224 x 224",
    stubs=("clu", "tensorflow", "tensorflow_datasets", "big_vision.input_pipeline", "big_vision.evaluators"),
)
