"""Predicted peak memory against the memory of the compiled step, for every family of models.

python -m bench.memory --family gpt t5

Peak bytes per device on 8 virtual CPU devices: the plan's, and the sum of arguments, results and temporaries in XLA's
``memory_analysis``, where results that alias donated arguments count once. Parameters and optimizer state are donated.
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import meshdsl as md
from bench.report import machine, table
from meshdsl.models import gpt, llama, mixture, mlp, recurrent, resnet, t5, vit
from meshdsl.util.text import bytes_text

BATCH, SEQ = 32, 64
STRATEGIES = ("data", "tensor", "fsdp", "fsdp+tensor", "zero", "expert", "spatial")
LLAMA = llama.Config(layers=4, embed=128, hidden=256, heads=4, groups=2, head=32, seq=2 * SEQ, vocab=1024)
MIXTURE = mixture.Config(*(2, 128, 256, 4, 2, 32, SEQ, 512), experts=8, choices=2, group=SEQ)
GPT = {"layers": 4, "embed": 128, "heads": 4, "seq": 2 * SEQ, "vocab": 1024}

# family -> its module, and a function from layout rules to its program
FAMILIES: dict[str, tuple[Any, Callable[[str], Any]]] = {
    "mlp": (mlp, lambda rules: mlp.program("features=512 hidden=1024 classes=64 layers=4", rules, batch=512)),
    "vit": (vit, lambda rules: vit.program(vit.Config(4, 128, 4, patch=4, image=32, classes=16), rules, batch=BATCH)),
    "resnet": (resnet, lambda rules: resnet.program(resnet.Config((3,), image=32, classes=16), rules, batch=64)),
    "gpt": (gpt, lambda rules: gpt.program(gpt.Config(**GPT), rules, batch=BATCH)),
    "gpt, remat": (gpt, lambda rules: gpt.program(gpt.Config(**GPT, remat="all"), rules, batch=BATCH)),
    "llama": (llama, lambda rules: llama.program(LLAMA, rules, batch=BATCH)),
    "mixture": (mixture, lambda rules: mixture.program(MIXTURE, rules, batch=BATCH)),
    "t5": (t5, lambda rules: t5.program(t5.Config(2, 128, 256, 4, 32, 512), rules, BATCH, source=SEQ, seq=SEQ)),
    "recurrent": (recurrent, lambda rules: recurrent.program(recurrent.Config(2, 128, vocab=512), rules, BATCH, SEQ)),
}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", nargs="*", choices=FAMILIES, default=FAMILIES)
    families = parser.parse_args().family
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = md.Mesh(data=4, model=2)
    found = {(f, s): both(f, s, mesh) for f in families for s in STRATEGIES if s in FAMILIES[f][0].RULES}
    rows = [(*name, *map(bytes_text, pair), f"{pair[0] / pair[1]:.3f}") for name, pair in found.items()]
    print(table(("family", "strategy", "planned", "compiled", "planned / compiled"), rows))
    off = np.abs([planned / compiled - 1 for planned, compiled in found.values()])
    print(f"\n{len(off)} steps on {mesh}: off by {np.median(off):.1%} in the median, {off.max():.1%} at most")
    print(machine())


def both(family: str, strategy: str, mesh: md.Mesh) -> tuple[int, int]:
    """Returns peak bytes per device, as planned and as compiled."""
    module, program = FAMILIES[family]
    model = program(module.RULES[strategy])
    sharded = md.parallelize(model.step, mesh, rules=model.rules, donate_argnums=(0, 1))
    planned = sharded.plan(*model.args).memory
    compiled = sharded.lower(*model.args).compile().memory_analysis()
    arguments = compiled.argument_size_in_bytes + compiled.output_size_in_bytes - compiled.alias_size_in_bytes
    jax.clear_caches()
    return planned, arguments + compiled.temp_size_in_bytes


if __name__ == "__main__":
    main()
