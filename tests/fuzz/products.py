"""Random products under plain ``jax.jit``, run on the devices at hand, beside what the checker says of them.

Meshes of up to five axes, every split of both arguments and of the result that divides, arguments of small integers:
what the partitioner makes of a product is right to the last bit, or wrong. The checker has to call the same ones wrong.
Those that are wrong, or are called so, are planned between the same layouts and run as well. openxla/xla#40034 reports
a wrong product on 4,096 GPUs.

JAX_NUM_CPU_DEVICES=16 python -m tests.fuzz.products --cases 1000 --seed 7
"""

import argparse
import math
import sys
import time
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import meshdsl as md
from meshdsl.lowering.partitioner import compiled_modules
from meshdsl.lowering.simulation.check import check_program
from tests.quick_compiles import compile_quickly

PRODUCTS = (
    "bd,df->bf", "bd,bf->df", "bsd,df->bsf", "bsf,df->bsd", "bsd,bsf->df", "bsd,bsf->bdf", "bsd,hdk->bshk",
    "bshk,hdk->bsd", "bshk,bsd->hdk", "bshd,bshe->hde",
)  # fmt: skip
LARGEST = 2**18
AXES = "vwxyz"


class Product:
    """A random product and the splits of its arguments and of its result.

    Args:
      rng: what it is drawn from. devices: of its mesh, a power of two.
    """

    def __init__(self, rng: np.random.Generator, devices: int) -> None:
        sizes = []
        while (left := devices // math.prod(sizes)) > 1:
            sizes.append(int(rng.choice([size for size in (2, 4, 8) if left % size == 0])))
        self.mesh = jax.make_mesh(tuple(sizes), tuple(AXES[: len(sizes)]), (AxisType.Auto,) * len(sizes))
        self.text = str(rng.choice(PRODUCTS))
        dims = self.text.replace("->", ",").split(",")
        self.sizes = {dim: int(rng.choice([4, 8, devices])) for dim in sorted({*"".join(dims)})}
        self.specs = [self._spec(rng, each) for each in dims]
        self.args = [rng.integers(-3, 4, [self.sizes[dim] for dim in each]).astype("float32") for each in dims[:2]]

    def _spec(self, rng: np.random.Generator, dims: str) -> P:
        """Each axis on a dim that it divides, or on none."""
        parts: list[list[str]] = [[] for _ in dims]
        for name in rng.permutation(list(self.mesh.shape)):
            at = int(rng.integers(len(dims) + 1))
            if at == len(dims):
                continue
            parts[at].append(str(name))
            if self.sizes[dims[at]] % math.prod(self.mesh.shape[each] for each in parts[at]):
                parts[at].pop()
        return P(*(tuple(part) or None for part in parts))

    def step(self, x: Any, y: Any) -> Any:
        """The product itself."""
        return jnp.einsum(self.text, x, y)

    def __str__(self) -> str:
        at = ",".join(f"{name}={size}" for name, size in self.mesh.shape.items())
        sizes = " ".join(f"{name}={size}" for name, size in self.sizes.items())
        return f"{self.text} on {at}, {sizes}, {self.specs[0]} times {self.specs[1]} to {self.specs[2]}"


def judge(product: Product, counts: Counter[str]) -> None:
    """Runs a product, checks it, and counts what comes out."""
    shardings = [NamedSharding(product.mesh, spec) for spec in product.specs]
    jitted = jax.jit(product.step, in_shardings=tuple(shardings[:2]), out_shardings=shardings[2])
    right = np.einsum(product.text, *product.args, optimize=True)
    shards = jitted(*product.args).addressable_shards
    wrong = not _is_right(shards, right)
    mesh = md.Mesh(**product.mesh.shape)
    check = check_program("step", compiled_modules(jitted.lower(*product.args)), mesh, ["the product"], inputs=2)
    counts["products"] += 1
    counts["wrong on devices"] += wrong
    counts["called wrong"] += not check.equal
    if wrong == check.equal:
        counts["FALSE ALARMS" if check.faults else "MISSED"] += 1
    if wrong or check.faults:
        blocks = {np.asarray(shard.data).tobytes() for shard in shards}
        moved = blocks <= {right[shard.index].tobytes() for shard in shards}
        counts["wrong: right blocks on other devices" if moved else "wrong: other values"] += wrong
        counts["wrong: devices that should hold the same differ"] += _replicas_differ(shards)
        counts[f"called: {check.faults[0].kind}" if check.faults else "called: right"] += 1
        counts["PLANNED WRONG"] += not _planned_is_right(product, right)
        print(f"{product}\n{check}\n", flush=True)


def _replicas_differ(shards: Any) -> bool:
    held: dict[str, set[bytes]] = {}
    for shard in shards:
        held.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
    return any(len(each) > 1 for each in held.values())


def _planned_is_right(product: Product, right: np.ndarray) -> bool:
    x, y, out = product.specs
    planned = md.parallelize(product.step, product.mesh, {"x": x, "y": y}, outputs={"*": out})
    return _is_right(planned(*product.args).addressable_shards, right)


def _is_right(shards: Any, right: np.ndarray) -> bool:
    return all(np.array_equal(np.asarray(shard.data), right[shard.index]) for shard in shards)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    compile_quickly()
    rng, counts, start = np.random.default_rng(asked.seed), Counter[str](), time.time()
    while counts["products"] < asked.cases:
        product = Product(rng, jax.device_count())
        if max(x.size for x in product.args) <= LARGEST:
            judge(product, counts)
            if counts["products"] % 100 == 0:
                print(f"{time.time() - start:.0f} s: {counts['products']} products", flush=True)
                jax.clear_caches()
    print("\n".join(f"{count:8,}  {name}" for name, count in sorted(counts.items())))
    sys.exit(counts["FALSE ALARMS"] + counts["MISSED"] + counts["PLANNED WRONG"] > 0)


if __name__ == "__main__":
    main()
