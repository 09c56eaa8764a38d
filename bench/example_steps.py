"""Programs that benchmarks measure: the examples, the demo's GPT at other depths, and arguments for them."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
from flax import nnx

from meshdsl.api import Program

EXAMPLES = Path(__file__).parent.parent / "examples"


def load_example(name: str) -> ModuleType:
    """Returns the module ``examples/{name}.py``."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def small_demo(embed: int, batch: int) -> ModuleType:
    """Returns the module of the demo's GPT with another width and other batches."""
    module = load_example("gpt")
    module.EMBED, module.WIDE, module.BATCH = embed, 4 * embed, batch
    module.graph = nnx.graphdef(nnx.eval_shape(lambda: module.GPT(nnx.Rngs(0))))
    return module


def deep_gpt(layers: int) -> Program:
    """Returns the demo's GPT with ``layers`` unrolled layers, as shapes."""
    module = load_example("gpt")

    class Unrolled(module.GPT):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.layers = nnx.List([module.Block(rngs) for _ in range(layers)])

        def __call__(self, tokens):
            x = self.embed[tokens] + self.position[...]
            for layer in self.layers:
                x = layer(x)
            return self.norm(x) @ self.embed.T

    module.GPT = Unrolled
    module.graph = nnx.graphdef(nnx.eval_shape(lambda: Unrolled(nnx.Rngs(0))))
    args = (*jax.eval_shape(lambda: module.init()), module.program.args[-1])
    return Program(module.step, args, {"batch/*": "data=S(0)", "params/layers/*/up/kernel": "model=S(1)"})


def random_batch(program: Program, vocabulary: int = 2048) -> dict[str, np.ndarray]:
    """Returns random tokens with the shapes of the program's batch."""
    rng = np.random.default_rng(0)
    return {name: rng.integers(0, vocabulary, x.shape).astype(x.dtype) for name, x in program.args[-1].items()}


def random_array(x: Any) -> Any:
    """Returns an array for a shape: random floats, zeros for other dtypes; anything but a shape is returned as it is.

    Floats are non-negative, since optimizer state contains second moments.
    """
    if not isinstance(x, jax.ShapeDtypeStruct):
        return x
    values = 0.1 * np.abs(np.random.default_rng(0).normal(size=x.shape))
    return (values if np.issubdtype(x.dtype, np.floating) else np.zeros(x.shape)).astype(x.dtype)
