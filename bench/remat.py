"""Plans that choose what to compute again beside the policies of ``jax.checkpoint``; writes docs/evidence/remat.md.

python -m bench.remat [cpu] [dgx-h100:8] [tpu-v5e:2x4]

Each model is planned at shares of the memory of the best plan found without a limit: keeping everything, with the
policies that people set per layer (``dots`` keeps products without batch dims, ``all`` keeps only the layer's input),
and with ``remat="auto"``. All are plans of the same planner at the same prices. With names of targets, steps that
compute again are compiled for them, or for the CPU devices at hand, and compared with their plans. Results are cached
in .cache/remat, one file per case.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from time import process_time
from typing import Any

import jax
import jax.numpy as jnp

from bench.report import summarised, table, versions
from meshdsl.api import Program, parallelize
from meshdsl.errors import MemoryLimitError
from meshdsl.layouts.mesh import Mesh
from meshdsl.models import gpt, llama
from meshdsl.plan import Plan
from meshdsl.util.text import bytes_text, percent_text, seconds_text

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "evidence" / "remat.md"
CACHE = ROOT / ".cache" / "remat"
SHARES = (0.9, 0.75, 0.6, 0.5, 0.4)
POLICIES = ("none", "dots", "all")
MESH = Mesh(data=8, topology="tpu-v5e")
LLAMA = llama.Config(16, 2048, 8192, 32, 8)  # the sizes of Llama 3.2 1B

# name -> its program with a policy, and its configuration in words
MODELS: dict[str, tuple[Callable[[str], Program], str]] = {
    "gpt2-124m": (
        lambda policy: gpt.program(replace(gpt.CONFIGS["gpt2-124m"], remat=policy), gpt.RULES["fsdp"], 64, 1024),
        "64 sequences of 1,024",
    ),
    "llama 1b": (
        lambda policy: llama.program(replace(LLAMA, remat=policy), llama.RULES["fsdp"], 16, 2048),
        "16 sequences of 2,048",
    ),
}


LAYERS, WIDTH, ROWS = 8, 512, 1 << 15  # of the steps that are compiled


def main() -> None:
    """Plans and compiles what is not cached and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*")
    CACHE.mkdir(parents=True, exist_ok=True)
    for target in parser.parse_args().targets:
        file = CACHE / f"compiled {target}.json"
        if not file.exists():
            file.write_text(json.dumps(list(compiled(target))))
    for name, (build, _) in MODELS.items():
        file = CACHE / f"{name}.json"
        if not file.exists():
            file.write_text(json.dumps(measured(name, build)))
    programs = [json.loads(file.read_text()) for file in sorted(CACHE.glob("compiled *.json"))]
    models = [json.loads((CACHE / f"{name}.json").read_text()) for name in MODELS]
    PAGE.write_text(page(models, [row for rows in programs for row in rows]))


def measured(name: str, build: Callable[[str], Program]) -> dict[str, Any]:
    """Returns the memory of the best plan found without a limit, and the seconds of the plans at every share of it."""
    programs = {policy: build(policy) for policy in POLICIES}
    free = planned(programs["none"], 1e15)
    assert free is not None
    rows = []
    for share in SHARES:
        limit = share * free.memory
        seconds = {
            policy: found and found.seconds for policy in POLICIES for found in [planned(programs[policy], limit)]
        }
        start = process_time()
        ours = planned(programs["none"], limit, remat="auto")
        facts = {"share": share, "policies": seconds, "auto": ours and ours.seconds, "took": process_time() - start}
        if ours and ours.recomputation:
            again = ours.recomputation
            facts |= {"values": len(again.values), "again": again.seconds, "peak": ours.memory}
        rows.append(facts)
        print(name, facts, flush=True)
    return {"model": name, "seconds": free.seconds, "memory": free.memory, "rows": rows}


def planned(program: Program, memory: float, **options: Any) -> Plan | None:
    """Returns the plan within a limit of bytes; None if none fits."""
    step = parallelize(
        program.step, MESH, rules=program.rules, memory=memory, donate_argnums=(0, 1), time_limit=60, **options
    )
    try:
        return step.plan(*program.args)
    except MemoryLimitError:
        return None


# ---- Compiled --------------------------------------------------------------------------------------------------------


def layer(x: jax.Array, weights: Any) -> jax.Array:
    """Returns a layer of two products and a residual connection."""
    up, down = weights
    return x + jnp.tanh(jax.nn.gelu(x @ up) @ down)


def unrolled(weights: Any, x: jax.Array) -> Any:
    """Returns a step of layers one after the other."""

    def loss(weights: Any) -> jax.Array:
        y = x
        for i in range(LAYERS):
            y = layer(y, [w[i] for w in weights])
        return (y**2).mean()

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


def scanned(weights: Any, x: jax.Array) -> Any:
    """Returns a step of a loop over layers."""

    def loss(weights: Any) -> jax.Array:
        return (jax.lax.scan(lambda y, w: (layer(y, w), None), x, weights)[0] ** 2).mean()

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


def compiled(target: str) -> Iterator[dict[str, Any]]:
    """Yields memory and FLOPs of steps within shares of the memory of their fastest plan, planned and compiled."""
    shapes = (LAYERS, WIDTH, 2 * WIDTH), (LAYERS, 2 * WIDTH, WIDTH), (ROWS, WIDTH)
    up, down, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    mesh = Mesh(data=8, topology=target.partition(":")[0])
    for step in (unrolled, scanned):

        def at(memory: float, remat: str, step: Callable[..., Any] = step) -> dict[str, Any]:
            sharded = parallelize(step, mesh, {"x": "data=S(0)"}, memory=memory, donate_argnums=0, remat=remat)
            plan = sharded.plan((up, down), x)
            held = sharded.verify((up, down), x, **({} if target == "cpu" else {"target": target})).held
            assert held is not None
            again = plan.recomputation.seconds / plan.seconds if plan.recomputation else 0.0
            return {
                **{"step": step.__name__, "target": target, "planned": held.memory, "compiled": held.compiled_memory},
                **{"flops": held.flops, "compiled flops": held.compiled_flops, "again": again},
            }

        free = at(1e15, "off")
        for share in (1.0, *SHARES[1::3]):
            yield (free if share == 1.0 else at(share * free["planned"], "auto")) | {"share": share}
            jax.clear_caches()


# ---- Page ------------------------------------------------------------------------------------------------------------


def page(models: list[dict[str, Any]], programs: list[dict[str, Any]]) -> str:
    """Returns the text of docs/evidence/remat.md."""
    header = (
        "model",
        "without limit",
        "limit",
        "keep all",
        "`dots`",
        "`all`",
        'remat="auto"',
        "computed again",
        "planning",
    )
    rows = [_row(model, row) for model in models for row in model["rows"]]
    made = f"`python -m bench.remat` ({versions()}); planning in seconds of one processor."
    sections = [INTRODUCTION, table(header, rows), *([COMPILED, _compiled(programs)] if programs else []), made]
    return summarised("\n\n".join(sections) + "\n", *_short(models))


def _compiled(programs: list[dict[str, Any]]) -> str:
    header = (
        "step",
        "compiled for",
        "limit",
        "computed again",
        "planned memory",
        "compiled",
        "planned FLOPs",
        "compiled",
    )
    rows = []
    for row in programs:
        memory = bytes_text(row["planned"]), f"{bytes_text(row['compiled'])} ({row['compiled'] / row['planned']:.2f})"
        flops = f"{row['flops']:.5g}", f"{row['compiled flops']:.5g}"
        limit = percent_text(row["share"]) if row["share"] < 1 else "none"
        rows.append((row["step"], row["target"], limit, percent_text(row["again"]), *memory, *flops))
    return table(header, rows)


def _row(model: dict[str, Any], row: dict[str, Any]) -> list[str]:
    seconds = [row["policies"][policy] for policy in POLICIES] + [row["auto"]]
    again = f"{row['values']} {'value' if row['values'] == 1 else 'values'}, {seconds_text(row['again'])}"
    limit = f"{percent_text(row['share'])}, {bytes_text(row['share'] * model['memory'])}"
    times = [seconds_text(each) if each else "does not fit" for each in seconds]
    return [model["model"], seconds_text(model["seconds"]), limit, *times, again, f"{row['took']:.1f} s"]


def _short(models: list[dict[str, Any]]) -> list[str]:
    pairs = [
        (min((s for s in row["policies"].values() if s), default=float("inf")), row["auto"] or float("inf"))
        for model in models
        for row in model["rows"]
    ]
    faster = sum(ours < best * (1 - 1e-3) for best, ours in pairs)
    slower = sum(ours > best * (1 + 1e-3) for best, ours in pairs)
    return [
        f'At {len(pairs)} limits, the plan with `remat="auto"` is predicted to be faster than the best policy in',
        f"{faster}, slower in {slower}, and else equal to it.",
    ]


INTRODUCTION = """# Recomputation, planned

A model at shares of the memory of the best plan found without a limit, on 8 TPU v5e as if they had that much,
parameters and optimizer state divided (`fsdp`): predicted step times of that plan, and within the limit of the best
plans that keep everything, that follow a policy of `jax.checkpoint` per layer (`dots`: products without batch dims are
kept; `all`: only the layer's input is), and with `remat="auto"` on the step without `jax.checkpoint`."""
COMPILED = f"""## Compiled

{LAYERS} layers of two products, {WIDTH} and {2 * WIDTH} wide, {ROWS:,} rows in float32 on 8 devices: memory and FLOPs
of products per device, of the plan and of the compiled program. If a compiler merged what is computed twice, its FLOPs
would be fewer. *Computed again* is the share of the step's seconds. The memory of unrolled layers on GPUs is predicted
badly, with recomputation and without; loops over layers are the safer form there."""

if __name__ == "__main__":
    main()
