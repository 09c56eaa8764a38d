"""What compilers make of rings: steps planned for overlap with and without them; writes docs/evidence/rings.md.

python -m bench.rings

A training step is planned and compiled for absent TPUs and GPUs with ``overlap="full"``, with the rings that the
planner chooses and with none. Results are cached in .cache/rings, one file per case.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import meshdsl as md
from bench.report import summarised, table, versions
from meshdsl.layouts.topology import topology
from meshdsl.lowering.aot_targets import parse_target
from meshdsl.util.text import bytes_text, seconds_text

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "evidence" / "rings.md"
CACHE = ROOT / ".cache" / "rings"
CASES = (("tpu-v5e:4x4", "data=4,model=4"), ("tpu-v5e:4x4", "data=1,model=16"), ("dgx-h100:8", "data=2,model=4"))
RINGS = {"none": md.Overlap("full", rings=()), "chosen": md.Overlap("full")}
ROWS, WIDTH, HIDDEN = 2048, 8192, 28672  # of the block; rows per device
Planned = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


# ---- Steps -----------------------------------------------------------------------------------------------------------


def block(mesh: md.Mesh) -> Planned:
    """Returns a step of Megatron's feed-forward block with sequence parallelism: step, arguments, options."""

    def loss(params: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
        up, down = params
        hidden = jnp.tanh(md.constrain(x, "data=S(0) model=B") @ up)
        total = md.constrain(md.constrain(hidden, "data=S(0) model=S(1)") @ down, "data=S(0) model=P")
        return jnp.mean((x + md.constrain(total, "data=S(0) model=S(0)")).astype(jnp.float32) ** 2)

    def step(params: tuple[jax.Array, jax.Array], x: jax.Array) -> Any:
        value, (grads, before) = jax.value_and_grad(loss, (0, 1))(params, x)
        return jax.tree.map(lambda w, g: w - (0.1 * g).astype(w.dtype), params, grads), value, before

    rows = ROWS * mesh.size
    up, down, x = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((WIDTH, HIDDEN), (HIDDEN, WIDTH), (rows, WIDTH)))
    pins = {"params/0": "data=B model=S(1)", "params/1": "data=B model=S(0)", "x": "data=S(0) model=S(0)"}
    return step, ((up, down), x), {"layouts": pins, "donate_argnums": 0}


def measured(target: str, axes: str) -> dict[str, Any]:
    """Plans and compiles the block with rings and without; returns seconds per step and bytes."""
    found = parse_target(target)
    mesh = md.Mesh.parse(axes, topology(found.preset))
    function, args, options = block(mesh)
    facts: dict[str, Any] = {"target": target, "mesh": axes, "compiler": found.compiler}
    for rings, overlap in RINGS.items():
        sharded = md.parallelize(function, mesh, overlap=overlap, **options)
        plan, report = sharded.plan(*args), sharded.verify(*args, target=target, exposed="ignore")
        assert report.overlap is not None and report.held is not None
        hops = [one for one in report.overlap.scheduled if one.sent.kind == "collective-permute"]
        facts[rings] = {
            "rings": [c.ring for c in plan.collectives if c.ring],
            "seconds": plan.seconds,
            "simulated": plan.simulated_seconds,
            "sent": sum(one.seconds * one.sent.trips for one in report.overlap.scheduled),
            "covered": report.overlap.covered,
            "permutes": [sum(one.sent.trips for one in hops if one.asynchronous), sum(one.sent.trips for one in hops)],
            "memory": [report.held.memory, report.held.compiled_memory],
            "flops": [report.held.flops, report.held.compiled_flops],
        }
    return facts


# ---- The page --------------------------------------------------------------------------------------------------------


def main() -> None:
    """Compiles the cases that are not cached, and writes the page."""
    for case in CASES:
        file = _file(case)
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(measured(*case)))
            jax.clear_caches()
            print(file.stem, flush=True)
    PAGE.write_text(page())


def _file(case: tuple[str, str]) -> Path:
    return CACHE / f"{' '.join(case)}.json"


def page() -> str:
    """Returns the text of docs/evidence/rings.md."""
    facts = [json.loads(_file(case).read_text()) for case in CASES]
    header = (
        "target",
        "mesh",
        "rings",
        "`seconds`",
        "`simulated_seconds`",
        "sent",
        "covered",
        "hops",
        "memory",
    )
    rows = [_row(fact, rings) for fact in facts for rings in RINGS]
    compilers = ", ".join(sorted({fact["compiler"] for fact in facts}))
    made = f"`python -m bench.rings` ({versions()}, {compilers})"
    return summarised("\n\n".join([INTRODUCTION, table(header, rows), FINDINGS, made]) + "\n", *_short(facts))


def _row(fact: dict[str, Any], rings: str) -> list[str]:
    one, head = fact[rings], [fact["target"], fact["mesh"]]
    kinds = [f"{one['rings'].count(kind)} {kind}" for kind in dict.fromkeys(one["rings"])]
    hops = "{} of {}".format(*one["permutes"]) if one["permutes"][1] else ""
    seconds = (seconds_text(one[name]) for name in ("seconds", "simulated", "sent", "covered"))
    memory = ", ".join(map(bytes_text, one["memory"]))
    return [*(head if rings == "none" else ["", ""]), ", ".join(kinds) or "none", *seconds, hops, memory]


def _short(facts: list[dict[str, Any]]) -> Iterator[str]:
    for fact in facts:
        none, chosen = fact["none"], fact["chosen"]
        times = (seconds_text(x) for x in (none["covered"], none["sent"], chosen["covered"], chosen["sent"]))
        text = "On {}, {}, {} of {} of a block's communication is beside products, with rings {} of {}."
        yield text.format(fact["target"], fact["mesh"], *times)


INTRODUCTION = f"""# Rings, compiled

Megatron's feed-forward block with sequence parallelism, planned with `overlap="full"`, with the
[rings](../howto/rings.md) that the planner chooses and with none (`md.Overlap("full", rings=())`), compiled for
devices that were not there and read by `sharded.verify(*args, target=...)`. `plan.seconds` counts everything one
after the other; *sent* are the seconds per step of the compiled collectives at the plan's prices, *covered* those
that the schedule has beside products, *hops* the permutes that are asynchronous around a product, of all; memory is
planned, compiled. Nothing was timed on a device.

The step is SGD on the block: {WIDTH:,} x {HIDDEN:,} in bfloat16, {ROWS:,} rows per device."""
FINDINGS = """* Rings are the gather and the reduce-scatter of the forward pass, on TPU v5e also reduce-scatters of the
  backward pass. The first reader of what the backward pass gathers is the gradient of a weight. There, parts of the
  whole result would be summed, which costs more than the ring hides, so that gather stays as it is.
* **TPU v5e.** A reduce-scatter that stands alone is synchronous; as hops it is not. An axis of 16 is a closed dim of
  the torus, and blocks go both ways around.
* **H100.** The reduce-scatter of the backward pass is no ring: the all-reduces over `data` run beside its product, in
  the simulation and in the compiled program.
* A ring is a loop in the compiled program. With two devices it is a loop of one step, which compilers inline; the
  last part stands behind a barrier, so that XLA does not make one product of both parts, behind the hop."""

if __name__ == "__main__":
    main()
