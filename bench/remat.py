"""Plans that choose what to compute again beside policies that people set; writes docs/evidence/remat.md.

python -m bench.remat [MODEL ...] [--compile cpu dgx-h100:8 tpu-v5e:2x4]

Ten models are planned at shares of the memory of the best plan found without a limit: with ``remat="auto"``, and with
the policies of MaxText (``Decoder.get_remat_policy`` in ``layers/nnx_decoders.py``; ``jax.checkpoint`` around each
layer, with values kept by name). All are plans of the same planner at the same prices. Every policy is planned without
a limit once. Its plan holds at every limit that it fits; a policy is planned within a limit only if its lower bound
without one is below the best policy found for that limit. Three points are derived from those plans instead of planned:

1. Policies that offload: values in the memory of hosts are not planned. The step takes as long as under the policy that
   keeps the same values on the device, longer by their transfers, and needs the memory of ``full``.
2. Policies per layer: a part of the layers follows one policy, the others another one. Memory and seconds are those of
   the two plans in that proportion.

With targets, steps that compute again are compiled for them, or for the CPU devices at hand, and compared with their
plans. Results are cached in .cache/remat, one file per model or target.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from time import process_time
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from bench.report import page_section, summarised, table, versions
from meshdsl.api import Program, parallelize
from meshdsl.errors import MemoryLimitError
from meshdsl.layouts.mesh import Mesh
from meshdsl.models import gpt, llama, mixture, recurrent, resnet, t5, vit
from meshdsl.plan import Plan
from meshdsl.util.text import bytes_text, percent_text, seconds_text

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "evidence" / "remat.md"
CACHE = ROOT / ".cache" / "remat"
SHARES = (0.9, 0.75, 0.6, 0.5, 0.4, 0.35)
EQUAL = 1e-3  # relative difference of seconds that counts as none
SEARCH = 3  # number of the search for what is computed again; rows of earlier ones are named on the page
GAP = 0.05  # that the summary counts the wider ones of

QKV = "query_proj key_proj value_proj"
# MaxText's policies: the names of values that they keep. ``conv`` is our name in ResNet, which MaxText has not.
POLICIES = {
    "full": "",
    "save_out_proj": "out_proj",
    "save_qkv_proj": QKV,
    "save_dot_except_mlp": f"{QKV} out_proj",
    "save_dot_except_mlpwi": f"{QKV} out_proj mlpwo",
    "save_dot_with_context_except_mlp": f"{QKV} context out_proj",
    "minimal": f"{QKV} out_proj mlpwi mlpwi_0 mlpwi_1 mlpwo conv",
    "minimal_with_context": f"{QKV} context out_proj mlpwi mlpwi_0 mlpwi_1 mlpwo conv",
}
OFFLOADED = {"qkv_proj_offloaded": "save_qkv_proj", "minimal_offloaded": "minimal"}
KEEP_ALL = "keep all"


@dataclass(frozen=True)
class Case:
    """A model on a mesh.

    Args:
      module: of the model.
      config: its sizes.
      rules: a key of the module's ``RULES``.
      mesh: axes and sizes.
      topology: of the mesh.
      sizes: arguments of the module's ``program``.
    """

    module: ModuleType
    config: Any
    rules: str
    mesh: str
    topology: str
    sizes: dict[str, int]

    def program(self, policy: str) -> Program:
        """Returns the step under a policy."""
        options = {"remat": "none"} if policy == KEEP_ALL else {"remat": "all", "keep": POLICIES[policy]}
        config = replace(self.config, **options)
        return self.module.program(config, self.module.RULES[self.rules], **self.sizes)

    def plan(self, policy: str, memory: float, remat: str = "off") -> Plan | None:
        """Returns the plan within a limit of bytes; None if none fits."""
        program, mesh = self.program(policy), Mesh.parse(self.mesh, self.topology)
        step = parallelize(program.step, mesh, rules=program.rules, memory=memory, donate_argnums=(0, 1), remat=remat)
        try:
            return step.plan(*program.args)
        except MemoryLimitError:
            return None


def _large(module: ModuleType, name: str, **options: Any) -> Any:
    return replace(module.CONFIGS[name], attend="fused", dtype="bfloat16", **options)


CASES = {
    "gpt2-124m": Case(gpt, gpt.CONFIGS["gpt2-124m"], "fsdp", "data=8", "tpu-v5e", {"batch": 64}),
    "vit-l": Case(vit, vit.CONFIGS["vit-l"], "fsdp", "data=8", "tpu-v5e", {"batch": 512}),
    "t5-large": Case(t5, t5.CONFIGS["t5-large"], "fsdp", "data=8", "tpu-v5e", {"batch": 128}),
    "resnet50": Case(resnet, resnet.CONFIGS["resnet50"], "data", "data=8", "tpu-v5e", {"batch": 2048}),
    "mamba-130m": Case(recurrent, recurrent.CONFIGS["mamba-130m"], "fsdp", "data=8", "tpu-v5e", {"batch": 64}),
    "llama3-8b": Case(llama, _large(llama, "llama3-8b"), "fsdp", "data=64", "tpu-v5p", {"batch": 128}),
    "mixtral-8x7b": Case(
        *(mixture, _large(mixture, "mixtral-8x7b", replicas=16), "fsdp+expert", "data=16,model=8"),
        *("dgx-h100", {"batch": 256}),
    ),
    "llama3-70b": Case(
        llama, _large(llama, "llama3-70b"), "fsdp+tensor", "data=128,model=4", "tpu-v5p", {"batch": 512}
    ),
    "gpt3-175b": Case(gpt, _large(gpt, "gpt3-175b"), "fsdp+tensor", "data=128,model=8", "dgx-h100", {"batch": 1536}),
    "llama3-405b": Case(
        llama, _large(llama, "llama3-405b"), "fsdp+tensor", "data=256,model=8", "dgx-h100", {"batch": 512}
    ),
}

LAYERS, WIDTH, ROWS = 8, 512, 1 << 15  # of the steps that are compiled


def main() -> None:
    """Plans and compiles what is not cached and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--compile", nargs="*", default=[], metavar="TARGET")
    arguments = parser.parse_args()
    CACHE.mkdir(parents=True, exist_ok=True)
    for target in arguments.compile:
        file = CACHE / f"compiled {target}.json"
        if not file.exists():
            file.write_text(json.dumps(list(compiled(target))))
    for name in arguments.models or CASES:
        measure(name, CACHE / f"{name}.json")
    programs = [json.loads(file.read_text()) for file in sorted(CACHE.glob("compiled *.json"))]
    models = [json.loads(file.read_text()) for name in CASES if (file := CACHE / f"{name}.json").exists()]
    PAGE.write_text(page(models, [row for rows in programs for row in rows]))


def measure(name: str, file: Path) -> None:
    """Plans what a file of rows lacks: policies without a limit, and within limits the best of them and our plan."""
    case, found = CASES[name], json.loads(file.read_text()) if file.exists() else {"rows": []}
    missing = [share for share in SHARES if all(share != row["share"] for row in found["rows"])]
    if not missing:
        return
    free = dict[str, Plan]()
    for policy in (KEEP_ALL, *POLICIES):
        plan = case.plan(policy, 1e15)
        assert plan is not None
        free[policy] = plan
    topology = Mesh.parse(case.mesh, case.topology).topology
    plans = {policy: (plan.memory, plan.seconds) for policy, plan in free.items()}
    transfer = 1 / topology.host_store + 1 / topology.host_load if topology.host_memory else None
    found |= {"model": name, "plans": plans, "transfer": transfer}
    for share in missing:
        limit, start = share * free[KEEP_ALL].memory, process_time()
        ours = case.plan(KEEP_ALL, limit, remat="auto")
        row: dict[str, Any] = {"share": share, "took": process_time() - start}
        row |= {
            "search": SEARCH,
            "auto": ours and ours.seconds,
            "gap": ours and ours.gap,
            "memory": ours and ours.memory,
        }
        if ours and ours.recomputation:
            row |= {"values": len(ours.recomputation.values), "again": ours.recomputation.seconds}
        found["rows"].append(row | _best_policy(case, free, limit))
        file.write_text(json.dumps(found))
        print(name, found["rows"][-1], flush=True)


def _best_policy(case: Case, free: dict[str, Plan], limit: float) -> dict[str, Any]:
    """Returns the policy whose plan within a limit is the fastest, and its seconds; None if none fits."""
    best, seconds, refused = None, inf, set[tuple[float, float]]()
    for policy, plan in sorted(free.items(), key=lambda each: (each[1].memory > limit, each[1].lower_bound)):
        point = plan.seconds, plan.memory
        if plan.lower_bound >= seconds or point in refused:  # policies with equal plans keep the same
            continue
        found = plan if plan.memory <= limit else case.plan(policy, limit)
        refused.add(point)
        if found and found.seconds < seconds:
            best, seconds = policy, found.seconds
    return {"policy": best, "best": best and seconds}


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
            try:
                yield (free if share == 1.0 else at(share * free["planned"], "auto")) | {"share": share}
            except MemoryLimitError:  # nothing fits on such devices
                continue
            finally:
                jax.clear_caches()


# ---- Page ------------------------------------------------------------------------------------------------------------


def page(models: list[dict[str, Any]], programs: list[dict[str, Any]]) -> str:
    """Returns the text of docs/evidence/remat.md."""
    header = (
        *("model", "limit", "best policy", "step", "offloaded", "per layer", 'remat="auto"', "gap"),
        *("computed again", "planning"),
    )
    rows = [_row(model, row) for model in models for row in model["rows"]]
    made = f"`python -m bench.remat` ({versions()}); planning in seconds of one processor."
    cases = table(("model", "mesh", "batch", "without limit", "memory"), [_case_row(model) for model in models])
    sections = [INTRODUCTION, cases, table(header, rows)]
    if missing := [name for name in CASES if all(name != model["model"] for model in models)]:
        sections.append(f"Not run: {', '.join(missing)}.")
    if old := [model["model"] for model in models if any(row.get("search", 1) < SEARCH for row in model["rows"])]:
        sections.append(f"{EARLIER} {', '.join(old)}.")
    written = PAGE.read_text() if PAGE.exists() else ""
    before = "\n".join(page_section(written, COMPILED)).strip()
    sections += [made, f"{COMPILED}\n\n{_compiled(programs)}" if programs else before]
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


def _case_row(model: dict[str, Any]) -> list[str]:
    case, (memory, seconds) = CASES[model["model"]], model["plans"][KEEP_ALL]
    times = seconds_text(seconds), bytes_text(memory)
    return [model["model"], f"`{case.mesh}`, {case.topology}", str(case.sizes["batch"]), *times]


def _row(model: dict[str, Any], row: dict[str, Any]) -> list[str]:
    limit = row["share"] * model["plans"][KEEP_ALL][0]
    again = "nothing"
    if "values" in row:
        again = f"{row['values']} {'value' if row['values'] == 1 else 'values'}, {seconds_text(row['again'])}"
    others = row["best"], _offloaded(model, limit), _per_layer(model, limit)
    times = [seconds_text(each) if each and each < inf else "none" for each in (*others, row["auto"])]
    gap = "" if row["gap"] is None else percent_text(row["gap"])
    policy = f"`{row['policy']}`" if row["policy"] else ""
    limits = f"{percent_text(row['share'])}, {bytes_text(limit)}"
    return [model["model"], limits, policy, *times, gap, again, f"{row['took']:.1f} s"]


def _offloaded(model: dict[str, Any], limit: float) -> float:
    """Returns the seconds of the best policy that offloads, within a limit; infinite if none fits."""
    return min((seconds for memory, seconds in _offloaded_plans(model) if memory <= limit), default=inf)


def _offloaded_plans(model: dict[str, Any]) -> list[tuple[float, float]]:
    """Returns memory and seconds of the policies that offload, derived from the plans that keep the same values.

    None is derived from a plan that needs less than that of ``full``, as its layouts may let it.
    """
    if not model["transfer"]:
        return []
    least = model["plans"]["full"][0]
    kept = [model["plans"][policy] for policy in OFFLOADED.values()]
    return [(least, seconds + (memory - least) * model["transfer"]) for memory, seconds in kept if memory > least]


def _per_layer(model: dict[str, Any], limit: float) -> float:
    """Returns the seconds of the best two policies, each for a part of the layers, within a limit."""
    plans = [*map(tuple, model["plans"].values()), *_offloaded_plans(model)]
    found = [seconds for memory, seconds in plans if memory <= limit]
    for less, slow in plans:
        for more, fast in plans:
            if less <= limit < more and fast < slow:
                found.append(slow + (fast - slow) * (limit - less) / (more - less))
    return min(found, default=inf)


def _short(models: list[dict[str, Any]]) -> list[str]:
    rows = [(model, row) for model in models for row in model["rows"]]
    ours = [row["auto"] or inf for _, row in rows]

    def counts(others: list[float]) -> str:
        faster = sum(a < b * (1 - EQUAL) for a, b in zip(ours, others, strict=True))
        slower = sum(a > b * (1 + EQUAL) for a, b in zip(ours, others, strict=True))
        return f"faster in {faster}, slower in {slower}"

    limits = [row["share"] * model["plans"][KEEP_ALL][0] for model, row in rows]
    layers = [_per_layer(model, limit) for (model, _), limit in zip(rows, limits, strict=True)]
    gaps = [row["gap"] for _, row in rows if row["gap"] is not None]
    wide, took = sum(gap > GAP for gap in gaps), max(row["took"] for _, row in rows)
    return [
        f'At {len(rows)} limits of {len(models)} models, the plan with `remat="auto"` is, beside the best policy of',
        f"MaxText, {counts([row['best'] or inf for _, row in rows])}, and beside the best two policies, each for a",
        f"part of the layers, {counts(layers)}. The largest gap is {percent_text(max(gaps))} ({wide} above 5%), and",
        f"the longest planning took {took:.0f} s.",
    ]


INTRODUCTION = """# Recomputation, planned

Models at shares of the memory of the best plan found without a limit, as if devices had that much; all donate
parameters and optimizer state. Columns of seconds are predicted step times, all of the same planner at the same prices:

- *best policy*: the fastest plan within the limit that keeps everything or follows a policy of MaxText
  (`Decoder.get_remat_policy` of AI-Hypercomputer/maxtext: `full`, `save_out_proj`, `save_qkv_proj`,
  `save_dot_except_mlp`, `save_dot_except_mlpwi`, `save_dot_with_context_except_mlp`, `minimal`,
  `minimal_with_context`): `jax.checkpoint` around each layer, with values kept by name. Our models name them as MaxText
  does; Mamba and ResNet, which it has not, by analogy (`models/recurrent.py`, `models/resnet.py`). In ResNet only the
  stacks follow the policy, and the first block of each stage keeps everything.
- *offloaded*: the best of `qkv_proj_offloaded` and `minimal_offloaded`, which our plans cannot express, since values
  inside a step are not planned in the host's memory. Derived: the step of the policy that keeps the same values on the
  device, plus their transfers, none of them hidden; the memory of `full`. Not derived where `full` needs more memory
  than the plan that keeps them, since layouts differ.
- *per layer*: the best two of all these, each for a part of the layers. Derived: memory and seconds of the plans
  without a limit, in that proportion. A loop over layers treats all of them alike, so `remat="auto"` has no such
  choice.
- *remat="auto"*: on the step without `jax.checkpoint`. *gap*: of the layouts, given what is computed again. What is
  computed again is found by a search without a bound.

Rematerialisation by XLA itself is not compared: it is not expressed in plans."""
EARLIER = """Rows of an earlier search for what is computed again, which may be slower than plans found since:"""
COMPILED = f"""## Compiled

{LAYERS} layers of two products, {WIDTH} and {2 * WIDTH} wide, {ROWS:,} rows in float32 on 8 devices: memory and FLOPs
of products per device, of the plan and of the compiled program. If a compiler merged what is computed twice, its FLOPs
would be fewer. *Computed again* is the share of the step's seconds. Unrolled layers on GPUs take less than planned if
nothing is computed again, and programs for TPUs take less everywhere. Limits within which nothing fits have no row."""

if __name__ == "__main__":
    main()
