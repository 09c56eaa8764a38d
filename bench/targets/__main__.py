"""Checks plans with the compilers of absent TPUs and GPUs, and writes docs/evidence/targets.md.

python -m bench.targets [gallery] [models] [limits]

Every strategy of the gallery, and models of more than 100 MB per device, are planned, lowered and compiled for a
target. The page shows whether the lowered program equals the plan, the collectives and FLOPs of the compiled program,
its memory, and whether it fits. Results are cached in .cache/targets, one file per case.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bench.report import summarised, table, versions
from bench.strategies import FILES, Strategy
from meshdsl.api import Program, Sharded, parallelize
from meshdsl.errors import VerifyError
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.aot_targets import parse_target
from meshdsl.models import gpt, llama, mixture, mlp, resnet, t5, vit
from meshdsl.util.text import bytes_text

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "evidence" / "targets.md"
CACHE = ROOT / ".cache" / "targets"
GALLERY = {4: ("tpu-v5e:2x2", "dgx-h100:4"), 8: ("tpu-v5e:2x4", "dgx-h100:8")}
TPU = "tpu-v5e:2x4"
BF16 = {"dtype": "bfloat16"}
GPT = gpt.Config(layers=12, embed=768, heads=12, seq=1024, vocab=50304, **BF16)
GPT_REMAT = gpt.Config(layers=12, embed=768, heads=12, seq=1024, vocab=50304, remat="all", **BF16)
LLAMA = llama.Config(8, 1024, 2816, 16, 8, 64, seq=1024, vocab=32000, remat="all", **BF16)
MIXTURE = mixture.Config(4, 768, 2048, 12, 4, 64, 1024, 32000, experts=8, choices=2, group=1024, **BF16)
T5 = t5.Config(6, 512, 2048, 8, 64, 32128)
VIT = vit.Config(12, 768, 12, patch=16, image=224, classes=1000)
RESNET = resnet.Config((1, 1, 1, 1))
GPT_WIDE = gpt.Config(layers=6, embed=1024, heads=16, seq=512, vocab=32000, **BF16)
LLAMA_F32 = llama.Config(6, 768, 2048, 12, 4, 64, seq=512, vocab=32000)
VIT_WIDE = vit.Config(8, 1024, 16, patch=16, image=224, classes=1000)
MLP = "features=4096 hidden=16384 classes=1024 layers=6"

# model -> its rules, its program for rules and a batch, the usual batch, and batches on either side of 16 GB
Make = Callable[[Any, int], Program]
MODELS: dict[str, tuple[Any, Make, int, tuple[int, ...]]] = {
    "GPT-2 124M": (gpt.RULES["fsdp"], lambda rules, n: gpt.program(GPT, rules, n), 16, (64, 96)),
    "GPT-2 124M, recomputed": (gpt.RULES["data"], lambda rules, n: gpt.program(GPT_REMAT, rules, n), 16, ()),
    "Llama, 8 layers of 1,024": (
        llama.RULES["fsdp+tensor"],
        lambda rules, n: llama.program(LLAMA, rules, n),
        16,
        (512, 768),
    ),
    "mixture of 8 experts": (
        mixture.RULES["expert"],
        lambda rules, n: mixture.program(MIXTURE, rules, n),
        16,
        (96, 128),
    ),
    "T5 small": (t5.RULES["fsdp"], lambda rules, n: t5.program(T5, rules, n, source=512, seq=512), 32, (224, 320)),
    "ViT-B": (vit.RULES["fsdp"], lambda rules, n: vit.program(VIT, rules, n), 64, (384, 512)),
    "GPT, tensor parallel": (gpt.RULES["tensor"], lambda rules, n: gpt.program(GPT_WIDE, rules, n), 32, ()),
    "Llama in float32, ZeRO": (llama.RULES["zero"], lambda rules, n: llama.program(LLAMA_F32, rules, n), 32, ()),
    "ViT, tensor parallel": (vit.RULES["tensor"], lambda rules, n: vit.program(VIT_WIDE, rules, n), 32, ()),
    "perceptron": (mlp.RULES["data"], lambda rules, n: mlp.program(MLP, rules, n), 4096, ()),
    "ResNet of 4 blocks": (resnet.RULES["data"], lambda rules, n: resnet.program(RESNET, rules, n), 128, ()),
}
PARTS = ("gallery", "models", "limits")


def main() -> None:
    """Compiles the cases that are not cached, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all by default")
    for part in parser.parse_args().parts or PARTS:
        for case, target, compile_case in _cases(part):
            _compile_once(part, case, target, compile_case)
    PAGE.write_text(page())


def _cases(part: str) -> Iterator[tuple[str, str, Callable[[], dict[str, Any]]]]:
    """Yields name, target, and a function that compiles the case and returns its facts."""
    if part == "gallery":
        for strategy in map(Strategy, FILES):
            for target in GALLERY[strategy.mesh.size]:
                yield strategy.name, target, lambda s=strategy, t=target: compile_for(s.sharded(), s.program.args, t)
        return
    for name, (rules, make, usual, sides) in MODELS.items():
        for batch in (usual,) if part == "models" else sides:
            yield f"{name}, batch {batch}", TPU, lambda r=rules, m=make, n=batch: _model(m(r, n))


def _model(program: Program) -> dict[str, Any]:
    mesh = Mesh(data=4, model=2, topology="tpu-v5e")
    sharded = parallelize(program.step, mesh, rules=program.rules, memory="1TB", donate_argnums=(0, 1))
    return compile_for(sharded, program.args, TPU)


def compile_for(sharded: Sharded, args: Any, target: str) -> dict[str, Any]:
    """Plans and verifies a step for a target; returns plain facts, or the message of a compilation that failed."""
    plan = sharded.plan(*args)
    found: dict[str, Any] = {"bytes": plan.bytes, "memory": plan.memory, "compiler": parse_target(target).compiler}
    try:
        report = sharded.verify(*args, target=target)
    except VerifyError as error:
        return found | {"fault": str(error)}
    assert report.held is not None
    held = {"compiled memory": report.held.compiled_memory, "flops": [report.held.flops, report.held.compiled_flops]}
    return found | held | {"made": float(sum(line.made or 0 for line in report.lines))}


def _compile_once(part: str, case: str, target: str, compile_case: Callable[[], dict[str, Any]]) -> None:
    file = CACHE / part / f"{case} on {target}.json"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"case": case, "target": target} | compile_case()))
        jax.clear_caches()
        print(file.stem, flush=True)


def page() -> str:
    """Returns the text of docs/evidence/targets.md."""
    found = {part: [json.loads(file.read_text()) for file in sorted((CACHE / part).glob("*.json"))] for part in PARTS}
    compilers = sorted({fact["compiler"] for facts in found.values() for fact in facts})
    introduction = (Path(__file__).parent / "introduction.md").read_text().rstrip()
    texts = {"gallery": (GALLERY_TEXT, _gallery), "models": (MODELS_TEXT, _models), "limits": (LIMITS_TEXT, _limits)}
    sections = [f"{text}\n\n{rows(found[part])}" for part, (text, rows) in texts.items() if found[part]]
    made = f"`python -m bench.targets` ({versions()}, {', '.join(compilers)})"
    return summarised("\n\n".join([introduction, *sections, made]) + "\n", *_short(found))


def _short(found: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    yield "Planned steps are compiled by the compilers of TPUs and GPUs, on a machine that has neither."
    if gallery := found["gallery"]:
        equal = sum("fault" not in fact for fact in gallery)
        cases = f"{equal} of {len(gallery)} cases of the gallery"
        yield f"In {cases}, the program given to the compiler communicates exactly as planned."
    if models := [fact for fact in found["models"] if "fault" not in fact]:
        off = np.abs([fact["memory"] / fact["compiled memory"] - 1 for fact in models])
        yield f"Memory of {len(off)} models is {np.median(off):.0%} off in the median, {off.max():.0%} at most."


def _gallery(facts: list[dict[str, Any]]) -> str:
    header = ("strategy", "target", "bytes planned", "lowered", "compiled", "memory planned", "compiled", "FLOPs")
    return table(header, [_strategy(fact) for fact in facts])


def _strategy(fact: dict[str, Any]) -> list[str]:
    if "fault" in fact:
        return [fact["case"], fact["target"], f"{fact['bytes']:,}", fact["fault"].splitlines()[0], *[""] * 4]
    ours, theirs = fact["flops"]
    flops = "equal" if ours == theirs else f"{theirs / ours:.3f} of the plan's"
    memory = bytes_text(fact["memory"]), bytes_text(fact["compiled memory"])
    return [fact["case"], fact["target"], f"{fact['bytes']:,}", "equal", f"{fact['made']:,.0f}", *memory, flops]


def _models(facts: list[dict[str, Any]]) -> str:
    header = ("model", "memory planned", "compiled", "planned / compiled", "bytes lowered", "FLOPs compiled / planned")
    compiled = [fact for fact in facts if "fault" not in fact]
    ratios = [fact["memory"] / fact["compiled memory"] for fact in compiled]
    rows = [
        (
            *(fact["case"], bytes_text(fact["memory"]), bytes_text(fact["compiled memory"])),
            *(f"{ratio:.3f}", "as planned", f"{fact['flops'][1] / fact['flops'][0]:.3f}"),
        )
        for fact, ratio in zip(compiled, ratios, strict=True)
    ]
    off = np.abs(np.array(ratios) - 1)
    within = f"{(off <= 0.15).sum()} of {len(off)} are within 15%, at which we aimed"
    summary = f"{within}; off by {np.median(off):.0%} in the median, {off.max():.0%} at most."
    return f"{table(header, rows)}\n\n{summary}"


def _limits(facts: list[dict[str, Any]]) -> str:
    header = ("model", "memory planned", "planned to fit", "compiles")
    return table(header, [(fact["case"], bytes_text(fact["memory"]), *_fits(fact)) for fact in facts])


def _fits(fact: dict[str, Any]) -> tuple[str, str]:
    limit = parse_target(fact["target"]).memory
    compiled = "no" if "fault" in fact else f"yes: {bytes_text(fact['compiled memory'])}"
    return "yes" if fact["memory"] <= limit else "no", compiled


GALLERY_TEXT = """## The gallery

Every strategy of [strategies](strategies.md). "Lowered" compares the program given to the compiler with the plan. They
are tiny: on a TPU, values are padded to tiles of 8 x 128, and small ones live in its vector memory, which is not
counted (128 MiB on a v5e; Austin et al., How to Scale Your Model, 2025). What is compiled for `dropless_experts` has
a second round of exchanges and products, which runs only where routing needs it."""
MODELS_TEXT = """## Memory of models

Models of `models/`, planned over `data=4,model=2` for `tpu-v5e:2x4` without a limit on memory, parameters and
optimizer state donated. Memory is counted as XLA's TPU backend allocates it (`meshdsl/planner/liveness/aliasing.py`):
16 bits per element for values that only matmuls read, as the matrix unit does; nothing for values that their consumers
can recompute from live ones; nothing for a scatter of one element per row. These rules were derived from the compiled
programs of GPT-2, ViT-B, T5 and the mixture below.

Tiles are not counted: a TPU pads the last two dims, in the order that its compiler chooses, to 8 x 128. It mostly finds
an order without padding, but not for ResNet's images of 64 channels and 16 examples per device, which take twice their
size."""
LIMITS_TEXT = """## What fits

Some of them with batches just below and above the 16 GB of a TPU v5e (its compiler uses up to 15.75 GiB)."""

if __name__ == "__main__":
    main()
