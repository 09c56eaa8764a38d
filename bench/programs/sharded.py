"""Programs that state shardings themselves, by logical axes or rules: their own jitted step, at its first call.

``build`` of their adapters runs the author's training up to that call, and returns what a function makes of the step
there, where the author's mesh and rules are in effect.
"""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import yaml
from jax.sharding import AxisType
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


class _Configs:
    """A stand-in for ``omegaconf``, of which the program reads, merges and converts trees of options."""

    @staticmethod
    def load(path: Any) -> dict[str, Any]:
        """Returns the options of a file."""
        options: dict[str, Any] = yaml.safe_load(Path(path).read_text())
        return options

    @staticmethod
    def create(options: Any) -> dict[str, Any]:
        """Returns options."""
        return dict(options)

    @staticmethod
    def from_cli(options: Any) -> dict[str, Any]:
        """Returns the options of ``name=value``."""
        return {name: yaml.safe_load(value) for name, _, value in (option.partition("=") for option in options)}

    @staticmethod
    def merge(*parts: Any) -> dict[str, Any]:
        """Returns all options, the last of a name."""
        return {name: value for part in parts for name, value in part.items()}

    @staticmethod
    def to_container(options: Any, resolve: bool) -> Any:
        """Returns options."""
        return options


def _maxtext(size: str, use: Use) -> Any:
    """``train_step`` of ``base.yml``, its logical axes over fsdp and tensor, as it is compiled ahead of time."""
    options = {"ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2, "hardware": "cpu", "attention": "dot_product"}
    options |= {"run_name": "inspected", "base_output_directory": ".", "dataset_type": "synthetic"}
    options |= {"enable_checkpointing": False, "enable_goodput_recording": False, "per_device_batch_size": 1}
    options |= {"skip_jax_distributed_system": True, "sharding_tolerance": 1.0, "log_config": False}
    if size == "small":
        options |= {"base_emb_dim": 128, "base_num_query_heads": 4, "base_num_kv_heads": 4, "base_mlp_dim": 512}
        options |= {"base_num_decoder_layers": 2, "head_dim": 32, "vocab_size": 512, "max_target_length": 64}
    stand_in = SimpleNamespace(OmegaConf=_Configs, DictConfig=dict)
    with mock.patch.dict("sys.modules", {"omegaconf": stand_in}), mock.patch.dict("os.environ", DECOUPLE_GCLOUD="TRUE"):
        from maxtext.trainers.pre_train import train_compile

        def mesh(config: Any) -> Any:
            devices = train_compile.maxtext_utils.create_device_mesh(config)
            return jax.sharding.Mesh(devices, config.mesh_axes, axis_types=(AxisType.Auto,) * devices.ndim)

        def compiled(step: Any, args: Any, _: Any, mesh: Any, inputs: Any, outputs: Any, static: Any, donated: Any,
                     config: Any, rules: Any) -> Any:  # fmt: skip
            with jax.set_mesh(mesh), rules:
                jitted = jax.jit(
                    step, in_shardings=inputs, out_shardings=outputs, static_argnums=static, donate_argnums=donated
                )
                made.append(use(jitted, args))

        made: list[Any] = []
        configs = Path(train_compile.pyconfig.__file__).parent
        words = ["train_compile", str(configs / "base.yml"), *(f"{name}={value}" for name, value in options.items())]
        with ExitStack() as patches:
            patches.enter_context(mock.patch.object(train_compile, "validate_config"))  # which wants absent devices
            patches.enter_context(mock.patch.object(train_compile, "get_topology_mesh", mesh))
            patches.enter_context(mock.patch.object(train_compile, "jit_and_compile", compiled))
            train_compile.is_oom(words)
        return made[0]


MAXTEXT = Adapter(
    "MaxText: its decoder of base.yml, logical axes over fsdp and tensor",
    "AI-Hypercomputer/maxtext",
    "e591f30cbbf217ed67ef71263ec0538239f9c3b8",
    _maxtext,
    "base.yml: 16 layers of 2048, 8 texts of 2048 tokens",
    folders=("src",),
    stubs=(
        *("pathwaysutils", "tensorflow", "tensorflow_datasets", "tensorflow_text", "tensorboardX", "grain", "datasets"),
        *("ml_goodput_measurement", "cloud_accelerator_diagnostics", "google.cloud", "google.api_core", "jetstream"),
        *("sentencepiece", "tiktoken", "seqio", "psutil", "PIL", "sympy", "tokamax", "aqt", "qwix", "drjax"),
        *("maxtext.kernels.mhc", "maxtext.common.grain_utility", "maxtext.multimodal.processor"),
    ),
)
