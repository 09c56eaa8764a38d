"""The check of a compiled program of many instructions, timed: layers of attention with tiny arrays, written out.

JAX_NUM_CPU_DEVICES=8 python -m bench.large_module --layers 96

Time then goes with instructions, not with elements: it is that of reading the text and of starting operations.
"""

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.hlo.parse import parse_module
from meshdsl.lowering.partitioner import compiled_modules
from meshdsl.lowering.simulation.check import check_program

MESH = Mesh(x=4, y=2)
WEIGHTS = {"q": (8, 8), "k": (8, 8), "v": (8, 8), "o": (8, 8), "up": (8, 16), "down": (16, 8)}


def loss(layers: list[dict[str, Any]], x: Any) -> Any:
    """Returns the mean square of what transformer blocks make of ``x``."""
    for w in layers:
        x = x + jax.nn.softmax((x @ w["q"]) @ (x @ w["k"]).T) @ (x @ w["v"]) @ w["o"]
        normal = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
        x = x + jax.nn.gelu(normal @ w["up"]) @ w["down"]
    return jnp.mean(x**2)


def step(layers: list[dict[str, Any]], x: Any) -> Any:
    """Returns the loss, and the weights moved by their normalised gradients."""
    value, gradients = jax.value_and_grad(loss)(layers, x)
    return value, jax.tree.map(lambda w, g: w - 0.1 * g / (jnp.sqrt(jnp.mean(g * g)) + 1e-3), layers, gradients)


def main() -> None:
    """Prints instructions and seconds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=96)
    parser.add_argument("--inputs", type=int, default=2)
    asked = parser.parse_args()
    mesh = jax.make_mesh(MESH.sizes, MESH.names, axis_types=(AxisType.Auto,) * 2)

    def shape(dims: tuple[int, ...], *spec: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    splits = {name: ("y",) if name in ("o", "down") else (None, "y") for name in WEIGHTS}
    layers = [{name: shape(dims, *splits[name]) for name, dims in WEIGHTS.items()} for _ in range(asked.layers)]
    lowered = jax.jit(step).lower(layers, shape((16, 8), "x"))
    modules = compiled_modules(lowered)
    for name, text in vars(modules).items():
        print(f"{name}: {sum(map(len, parse_module(text).computations.values())):,} instructions")
    paths = [str(i) for i in range(len(jax.tree.leaves(lowered.out_info)))]
    start, used = time.monotonic(), time.process_time()
    check = check_program("step", modules, MESH, paths, asked.inputs)
    print(f"{time.monotonic() - start:.1f} s, of a processor {time.process_time() - used:.1f} s")
    print(f"{len(check.agreeing)} of {check.results} results agree, {len(check.faults)} are wrong")


if __name__ == "__main__":
    main()
