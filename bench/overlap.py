"""What compilers hide of explicit collectives, and what plans call hidden; writes docs/evidence/overlap.md.

python -m bench.overlap [kinds] [models]

``kinds`` compiles small programs of one collective beside products; the presets of topologies have their results
(``Topology.asynchronous``). ``models`` compiles planned training steps for absent TPUs and GPUs, and the same steps
under ``jax.jit`` with the plan's layouts. Results are cached in .cache/overlap, one file per case.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import meshdsl as md
from bench.report import page_section, summarised, table, versions
from meshdsl.api import Program, Sharded, parallelize
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.topology import KINDS, topology
from meshdsl.lowering.aot_targets import parse_target
from meshdsl.lowering.hlo.parse import parse_module
from meshdsl.lowering.hlo.schedule import ScheduledCollective, read_schedule
from meshdsl.lowering.shardings import device_mesh, partition_spec
from meshdsl.models import gpt, llama, vit
from meshdsl.plan import Plan
from meshdsl.util.text import seconds_text

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "evidence" / "overlap.md"
CACHE = ROOT / ".cache" / "overlap"
TARGETS = ("tpu-v5e:4x4", "tpu-v6e:4x4", "dgx-h100:8")
PARTS = ("kinds", "models")
SIDE = 4096  # of the products in programs of one collective
TRIPS = 4

# ---- One collective beside products ----------------------------------------------------------------------------------


def send(kind: str, x: jax.Array, devices: int) -> jax.Array:
    """Returns the result of a collective over the axis ``data``."""
    if kind == "all-gather":
        return lax.all_gather(x, "data", axis=0, tiled=True)
    if kind == "all-reduce":
        return lax.psum(x, "data")
    if kind == "reduce-scatter":
        return lax.psum_scatter(x, "data", scatter_dimension=0, tiled=True)
    if kind == "all-to-all":
        return lax.all_to_all(x, "data", 0, 0, tiled=True)
    return lax.ppermute(x, "data", [(i, (i + 1) % devices) for i in range(devices)])


def beside(kind: str, where: str, loop: bool, devices: int) -> Callable[..., Any]:
    """Returns a program with two products that depend on each other, and a collective that neither waits for.

    Args:
      kind: of the collective.
      where: it sends an ``argument``, a product's ``result``, or a product's ``operand``.
      loop: the program is the body of a scan.
      devices: on the axis.
    """

    def step(x: jax.Array, w: jax.Array, s: jax.Array) -> tuple[jax.Array, jax.Array]:
        sent = send(kind, s @ w if where == "result" else s, devices)
        return jnp.tanh(x @ w) @ w, sent @ w if where == "operand" else 2 * sent

    def looped(x: jax.Array, w: jax.Array, s: jax.Array) -> tuple[jax.Array, jax.Array]:
        def body(x: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array]:
            y, sent = step(x, w, s + i.astype(s.dtype))
            return jnp.tanh(y), jnp.sum(sent.astype(jnp.float32))

        return lax.scan(body, x, jnp.arange(TRIPS))

    return looped if loop else step


def kinds_on(target: str) -> dict[str, Any]:
    """Compiles every kind of collective in every place for a target; returns which run beside a product."""
    found = parse_target(target)
    mesh = Mesh(data=found.size, topology=topology(found.preset))
    devices = device_mesh(mesh, found.devices(mesh))
    rows = {}
    for kind in KINDS:
        for where in ("argument", "result", "operand"):
            for loop in (False, True):
                rows[f"{kind} {where} {'loop' if loop else 'straight'}"] = _sent_so(kind, where, loop, mesh, devices)
    return {"compiler": found.compiler, "rows": rows}


def _sent_so(kind: str, where: str, loop: bool, mesh: Mesh, devices: jax.sharding.Mesh) -> list[list[Any]]:
    """Compiled kind of every collective of a program, and whether it is asynchronous."""
    every = PartitionSpec()
    function = beside(kind, where, loop, mesh.size)
    mapped = jax.shard_map(function, mesh=devices, in_specs=every, out_specs=every, check_vma=False)
    rows = SIDE // mesh.size if kind == "all-gather" else SIDE
    shapes = [
        jax.ShapeDtypeStruct((n, SIDE), jnp.bfloat16, sharding=NamedSharding(devices, every))
        for n in (SIDE, SIDE, rows)
    ]
    text = jax.jit(mapped).lower(*shapes).compile().as_text()
    return [[c.sent.kind, c.asynchronous] for c in read_schedule(parse_module(text), mesh).collectives]


# ---- Steps of models -------------------------------------------------------------------------------------------------

GPT = gpt.Config(4, 2048, 16, seq=1024, vocab=4096, remat="all", dtype="bfloat16")
LLAMA = llama.Config(4, 2048, 5632, 16, 8, 128, seq=1024, vocab=4096, remat="all", dtype="bfloat16")
VIT = vit.Config(4, 2048, 16, remat="all")
STRATEGIES = {"FSDP": "fsdp", "FSDP and tensor": "fsdp+tensor", "Megatron, sequence parallel": "tensor"}
MESHES = {  # by strategy and number of devices
    "FSDP": {16: "data=16", 8: "data=8"},
    "FSDP and tensor": {16: "data=4,model=4", 8: "data=2,model=4"},
    "Megatron, sequence parallel": {16: "data=4,model=4", 8: "data=2,model=4"},
}
SEQUENCES, IMAGES = 4, 16  # per device of the axis ``data``
MODELS: dict[str, tuple[Any, Callable[[md.Rules | str, int], Program]]] = {
    "GPT": (gpt, lambda rules, data: gpt.program(GPT, rules, SEQUENCES * data)),
    "Llama": (llama, lambda rules, data: llama.program(LLAMA, rules, SEQUENCES * data)),
    "ViT": (vit, lambda rules, data: vit.program(VIT, rules, IMAGES * data)),
}
UNCOMPILED = {("ViT", "dgx-h100:8")}  # jax-cuda12-plugin 0.10.2: "Couldn't find output tile sizes that satisfy hlo"
SHARE = 0.8  # of the memory that the plan without a limit takes, so that gathers stay in the loop over layers


def model_cases() -> Iterator[tuple[str, str, str]]:
    """Yields model, strategy and target."""
    cases = ((m, s, t) for t in reversed(TARGETS) for m in MODELS for s in STRATEGIES)
    yield from (case for case in cases if (case[0], case[2]) not in UNCOMPILED)


def model_on(model: str, strategy: str, target: str) -> dict[str, Any]:
    """Plans and compiles a model's step; returns seconds per step, planned and compiled."""
    found = parse_target(target)
    mesh = Mesh.parse(MESHES[strategy][found.size], topology(found.preset))
    family, make = MODELS[model]
    program = make(family.RULES[STRATEGIES[strategy]], mesh.sizes_by_name["data"])

    def sharded(over: Mesh, memory: Any) -> Sharded:
        return parallelize(program.step, over, rules=program.rules, memory=memory, donate_argnums=(0, 1))

    limit = SHARE * sharded(mesh, "1TB").plan(*program.args).memory
    ours = sharded(mesh, limit)
    plan = ours.plan(*program.args)
    prefetching = replace(mesh.topology, asynchronous=KINDS, across_loops=True)
    before = sharded(Mesh.parse(MESHES[strategy][found.size], prefetching), limit).plan(*program.args)
    report = ours.verify(*program.args, target=target)
    assert report.overlap is not None
    return {
        "compiler": found.compiler,
        "planned": sum(c.seconds * c.trips for c in plan.collectives),
        "hidden before": before.seconds - before.simulated_seconds,
        "hidden": plan.seconds - plan.simulated_seconds,
        "simulated": plan.simulated_seconds,
        "replayed": report.overlap.replayed,
        "computing": report.overlap.computing,
        "compiled": _seconds(report.overlap.scheduled),
        "covered": report.overlap.covered,
        "partitioned": _seconds(partitioned(program, plan, target)),
    }


def _seconds(scheduled: Any) -> list[float]:
    """Seconds per step of compiled collectives, and how many of them are covered."""
    return [sum(getattr(c, name) * c.sent.trips for c in scheduled) for name in ("seconds", "covered")]


def partitioned(program: Program, plan: Plan, target: str) -> tuple[ScheduledCollective, ...]:
    """Returns the collectives of the step under ``jax.jit``, arguments and results in the plan's layouts."""
    devices = device_mesh(plan.mesh, parse_target(target).devices(plan.mesh))
    leaves, tree = jax.tree.flatten(program.args)
    at = [NamedSharding(devices, partition_spec(x.layout, len(x.shape))) for x in plan.inputs]
    out = [NamedSharding(devices, partition_spec(x.layout, len(x.shape))) for x in plan.outputs]

    def step(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(program.step(*jax.tree.unflatten(tree, leaves)))

    donated = tuple(range(len(jax.tree.leaves(program.args[:2]))))
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s) for x, s in zip(leaves, at, strict=True)]
    text = jax.jit(step, out_shardings=out, donate_argnums=donated).lower(*shapes).compile().as_text()
    return read_schedule(parse_module(text), plan.mesh).collectives


# ---- The page --------------------------------------------------------------------------------------------------------


def main() -> None:
    """Compiles the cases that are not cached, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all by default")
    for part in parser.parse_args().parts or PARTS:
        if part == "kinds":
            for target in TARGETS:
                _once(f"kinds on {target}", {"target": target}, lambda t=target: kinds_on(t))
        else:
            for model, strategy, target in model_cases():
                case = {"model": model, "strategy": strategy, "target": target}
                _once(f"step of {model}, {strategy} on {target}", case, lambda c=case: model_on(**c))
    PAGE.write_text(page())


def _once(name: str, case: dict[str, str], compile_case: Callable[[], dict[str, Any]]) -> None:
    file = CACHE / f"{name}.json"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(case | compile_case()))
        jax.clear_caches()
        print(name, flush=True)


def page() -> str:
    """Returns the text of docs/evidence/overlap.md."""
    facts = [json.loads(file.read_text()) for file in sorted(CACHE.glob("*.json"))]
    kinds = [fact for fact in facts if "rows" in fact]
    models = [fact for fact in facts if "replayed" in fact]
    written = PAGE.read_text() if PAGE.exists() else ""
    sections = [INTRODUCTION, KINDS_TEXT + "\n\n" + _kinds(kinds) if kinds else _written(written, KINDS_TEXT)]
    sections += [MODELS_TEXT + "\n\n" + _models(models)] if models else []
    compilers = sorted({fact["compiler"] for fact in facts})
    made = f"`python -m bench.overlap` ({versions()}, {', '.join(compilers)})"
    return summarised("\n\n".join([*sections, made, _written(written, CAUSES)]) + "\n", *_short(models))


def _written(page: str, title: str) -> str:
    """A section as the page has it."""
    return "\n".join(page_section(page, title)).strip()


def _short(models: list[dict[str, Any]]) -> Iterator[str]:
    yield "What runs beside products is read from the schedules of programs compiled for absent TPUs and GPUs."
    if models:
        before, now, covered = (sum(fact[name] for fact in models) for name in ("hidden before", "hidden", "covered"))
        hidden = seconds_text(sum(map(_hidden, models)))
        yield (
            f"Of {seconds_text(before)} that systems could hide in {len(models)} steps, plans call {seconds_text(now)} "
            f"hidden; the compiled schedules hide {hidden}, {seconds_text(covered)} of it beside products."
        )


def _kinds(facts: list[dict[str, Any]]) -> str:
    header = ("collective", "sends", "in", *(fact["target"] for fact in facts))
    names = list(facts[0]["rows"])
    rows = [(*name.split(" "), *(_how(name, fact["rows"][name]) for fact in facts)) for name in names]
    return table(header, rows)


def _how(name: str, found: list[list[Any]]) -> str:
    parts = []
    for kind, asynchronous in found:
        how = "asynchronous" if asynchronous else "synchronous"
        parts.append(how if kind == name.split(" ")[0] else f"{how} {kind}")
    return ", ".join(dict.fromkeys(parts))


def _models(facts: list[dict[str, Any]]) -> str:
    header = (
        *("model", "strategy", "target", "planned", "could be hidden", "called hidden"),
        *("compiled", "hidden", "covered", "step", "replayed", "`jax.jit`", "covered"),
    )
    return table(header, [_model(fact) for fact in facts])


def _hidden(fact: dict[str, Any]) -> float:
    """Seconds that the replayed schedule saves against computation and collectives one after the other."""
    return float(fact["computing"] + fact["compiled"][0] - fact["replayed"])


def _model(fact: dict[str, Any]) -> list[str]:
    steps = fact["simulated"], fact["replayed"]
    (compiled, covered), promised = fact["compiled"], (fact["planned"], fact["hidden before"], fact["hidden"])
    seconds = *promised, compiled, _hidden(fact), covered, *steps, *fact["partitioned"]
    return [fact["model"], fact["strategy"], fact["target"], *map(seconds_text, seconds)]


INTRODUCTION = """# Overlap, in compiled programs

A plan's `with overlap` is a promise about a program that a compiler orders. `sharded.verify(*args,
target="tpu-v5e:4x4")` reads that order ([what is hidden](../concepts/execution.md)): a collective is
asynchronous where products stand between its start and its done, and *covered* for as long as these take at
the plan's prices; two transfers over one link are not covered by the same second. Nothing here was timed on a
device."""
CAUSES = "## Why plan and program differ"  # written by hand
KINDS_TEXT = f"""## What compilers make asynchronous

One collective beside two products of {SIDE:,} x {SIDE:,} x {SIDE:,} in bfloat16 that do not wait for it, as
explicit collectives in `jax.shard_map`: of an argument, of a product's result, or of another product's
operand, in straight code and in the body of a scan. `Topology.asynchronous` of the presets are the kinds that
run beside products on its chips, with the source of each in its file."""
MODELS_TEXT = f"""## Steps of models

Training steps of {GPT.layers} layers of {GPT.embed:,}, recomputed: in bfloat16 with {SEQUENCES} sequences of 1,024
per device of `data`, ViT in float32 with {IMAGES} images; seconds per step at the topology's prices. *Planned*
is all communication of the plan; *could be hidden* what a system hides that sends across iterations of
loops (`across_loops`), as every plan promised before topologies said what their compilers do; *called hidden*
what the plan promises now, `plan.seconds - plan.simulated_seconds`. Then the seconds of the compiled
collectives, how many of them the replayed schedule *hides* behind computation of any kind, contention taken
off, as a plan counts, and how many are covered, which products alone do: of our program, and of `jax.jit`
with the same layouts of arguments and results. *Step* is
`plan.simulated_seconds`, *replayed* what the compiled schedule of our program takes at the same prices
([how](../concepts/execution.md)). Memory is
limited to {SHARE:.0%} of what the plan takes without a limit, so that parameters are gathered in the loop
over layers where they are divided. ViT is not compiled for H100, where XLA without a device
finds no tiles for some of its products in float32; rows that the table lacks were not measured in this state
of the code."""


if __name__ == "__main__":
    main()
