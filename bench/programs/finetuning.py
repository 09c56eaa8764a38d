"""Fine-tuning: low-rank updates of a pretrained language model."""

from typing import Any

import jax
import numpy as np
import optax

from bench.programs.adapter import Adapter, Training


def _lora(size: str) -> Training:
    """Gradients of the low-rank matrices of every product in a Llama's MLPs; all other weights are frozen."""
    import lorax
    import test_llama_fine_tuning_jax as program
    from transformers import FlaxLlamaForCausalLM, LlamaConfig

    if size == "small":
        rows, length, rank = 16, 32, 4
        sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    else:
        rows, length, rank = 32, 1024, 4
        sizes = {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
        heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    model = FlaxLlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False), _do_init=False)
    optimizer = optax.adamw(learning_rate=1e-4, weight_decay=0.01)
    compute_grads = program.create_compute_grads_fn(program.create_loss_fn(lorax.lora(model)))

    def step(trainable: Any, frozen: Any, state: Any, ids: Any, mask: Any, labels: Any) -> Any:
        loss, grads = compute_grads(trainable, frozen, ids, mask, labels)
        updates, state = optimizer.update(grads, state, trainable)
        return optax.apply_updates(trainable, updates), state, loss

    def batch(seed: int) -> tuple[np.ndarray, ...]:
        rng = np.random.default_rng(seed)
        ids = rng.integers(0, sizes["vocab_size"], (rows, length), dtype=np.int32)
        mask = (np.arange(length) < rng.integers(length // 2, length + 1, (rows, 1))).astype(np.int32)
        return ids, mask, np.where(mask, ids, -100)

    def arguments() -> Any:
        weights = model.init_weights(jax.random.PRNGKey(0), (1, 1))
        spec = lorax.simple_spec(weights, program.create_lora_decision_fn(rank), tune_vectors=False)
        adapted = lorax.init_lora(weights, spec, jax.random.PRNGKey(42))
        trainable, frozen = lorax.helpers.split_trainable_frozen(adapted, spec)
        return trainable, frozen, optimizer.init(trainable), *batch(0)

    first = arguments() if size == "small" else jax.eval_shape(arguments)
    return Training(
        step,
        first,
        {"ids": 0, "mask": 0, "labels": 0},
        lambda args, result, seed: (result[0], args[1], result[1], *batch(seed)),
    )


LORA = Adapter(
    "LoRA of a Llama (lorax on quax, transformers)",
    "agobeljicTT/tt-blacksmith",
    "d9a7cdc86613641642ba505a5016cab0c40e4a6d",
    _lora,
    "Llama 3.2 1B, rank 4, 32 texts of 1024 tokens",
    changed=(
        "the step is a function: its three lines of gradients and optimizer, between two more",
        "`md.parallelize` plans it",
    ),
    folders=("blacksmith/experiments/jax/llama",),
    stubs=("blacksmith", "datasets", "wandb"),
)
