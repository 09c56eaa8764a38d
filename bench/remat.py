"""Plans that choose what to compute again beside policies that people set; writes docs/evidence/remat.md.

python -m bench.remat [MODEL ...] [--compile cpu dgx-h100:8 tpu-v5e:2x4] [--xla MODEL ...]

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
plans. With ``--xla``, plans that keep everything are compiled for H100s of so little memory that XLA computes again.
Results are cached in .cache/remat, one file per model or target.
"""

import argparse
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import resources
from math import inf
from pathlib import Path
from time import process_time
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.topologies import get_topology_desc

from bench.report import page_section, summarised, table, versions
from meshdsl.api import Program, Sharded, parallelize
from meshdsl.errors import MemoryLimitError
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.aot_targets import CompileTarget, parse_target
from meshdsl.lowering.hlo.flops import product_flops
from meshdsl.lowering.hlo.parse import parse_module
from meshdsl.lowering.hlo.schedule import read_schedule
from meshdsl.lowering.shardings import device_mesh
from meshdsl.lowering.verify import compiled_bytes
from meshdsl.models import gpt, llama, mixture, recurrent, resnet, t5, vit
from meshdsl.plan import Plan
from meshdsl.util.text import bytes_text, change_text, percent_text, seconds_text

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "evidence" / "remat.md"
CACHE = ROOT / ".cache" / "remat"
SHARES = (0.9, 0.75, 0.6, 0.5, 0.4, 0.35)
EQUAL = 1e-3  # relative difference of seconds that counts as none
SEARCH = 6  # number of the search for what is computed again; rows of earlier ones are named on the page
COMPILED_SHARES = (0.75, 0.4, 0.2, 0.16)
XLA_SHARES = (0.9, 0.35)  # that XLA compiles within
V5E = "tpu-v5e:2x4"
H100 = "dgx-h100"
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

    @property
    def devices(self) -> Mesh:
        """The mesh on its topology."""
        return Mesh.parse(self.mesh, self.topology)

    def program(self, policy: str) -> Program:
        """Returns the step under a policy."""
        options = {"remat": "none"} if policy == KEEP_ALL else {"remat": "all", "keep": POLICIES[policy]}
        config = replace(self.config, **options)
        return self.module.program(config, self.module.RULES[self.rules], **self.sizes)

    def step(self, policy: str, memory: float, remat: str = "off") -> tuple[Sharded[..., Any], tuple[Any, ...]]:
        """Returns the step to be planned within a limit of bytes, and its arguments."""
        program = self.program(policy)
        options: dict[str, Any] = {"rules": program.rules, "donate_argnums": (0, 1), "remat": remat}
        return parallelize(program.step, self.devices, memory=memory, **options), program.args

    def plan(self, policy: str, memory: float, remat: str = "off") -> Plan | None:
        """Returns the plan within a limit of bytes; None if none fits."""
        step, args = self.step(policy, memory, remat)
        try:
            return step.plan(*args)
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
    parser.add_argument("--xla", nargs="*", default=[], metavar="MODEL")
    arguments = parser.parse_args()
    CACHE.mkdir(parents=True, exist_ok=True)
    for target in arguments.compile:
        file = CACHE / f"compiled {target}.json"
        if not file.exists():
            file.write_text(json.dumps(list(compiled(target))))
    for name in arguments.xla:
        if name in STEPS:
            mesh = Mesh(data=8, topology=H100)
            compile_within(*small(STEPS[name], mesh, 1e15, "off"), mesh, CACHE / f"xla {name}.json")
            continue
        case = CASES[name]
        there = replace(case, topology=H100)
        compile_within(*there.step(KEEP_ALL, 1e15), there.devices, CACHE / f"xla {name}.json")
        if case.topology == "tpu-v5e":
            compile_within_chips(case, CACHE / f"xla {V5E} {name}.json")
    for name in arguments.models or CASES:
        measure(name, CACHE / f"{name}.json")
    programs = [json.loads(file.read_text()) for file in sorted(CACHE.glob("compiled *.json"))]
    models = [json.loads(file.read_text()) for name in CASES if (file := CACHE / f"{name}.json").exists()]
    within = {file.stem: json.loads(file.read_text()) for file in CACHE.glob("xla *.json")}
    PAGE.write_text(page(models, [row for rows in programs for row in rows], within))


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
    topology = case.devices.topology
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


STEPS: dict[str, Callable[..., Any]] = {"unrolled": unrolled, "scanned": scanned}


def small(step: Callable[..., Any], mesh: Mesh, memory: float, remat: str) -> tuple[Sharded[..., Any], tuple[Any, ...]]:
    """Returns a step of layers to be planned within a limit of bytes, and its arguments."""
    shapes = (LAYERS, WIDTH, 2 * WIDTH), (LAYERS, 2 * WIDTH, WIDTH), (ROWS, WIDTH)
    up, down, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    return parallelize(step, mesh, {"x": "data=S(0)"}, memory=memory, donate_argnums=0, remat=remat), ((up, down), x)


def compiled(target: str) -> Iterator[dict[str, Any]]:
    """Yields memory and FLOPs of steps within shares of the memory of their fastest plan, planned and compiled."""
    mesh = Mesh(data=8, topology=target.partition(":")[0])
    for step in STEPS.values():

        def at(memory: float, remat: str, step: Callable[..., Any] = step) -> dict[str, Any]:
            sharded, args = small(step, mesh, memory, remat)
            plan = sharded.plan(*args)
            held = sharded.verify(*args, **({} if target == "cpu" else {"target": target})).held
            assert held is not None
            again = plan.recomputation.seconds / plan.seconds if plan.recomputation else 0.0
            first = [k for _, k in plan.recomputation.divided] if plan.recomputation else []
            return {
                **{"step": step.__name__, "target": target, "planned": held.memory, "compiled": held.compiled_memory},
                **{"flops": held.flops, "compiled flops": held.compiled_flops, "again": again, "first": first},
            }

        free = at(1e15, "off")
        for share in (1.0, *COMPILED_SHARES):
            try:
                yield (free if share == 1.0 else at(share * free["planned"], "auto")) | {"share": share}
            except MemoryLimitError:  # nothing fits on such devices
                continue
            finally:
                jax.clear_caches()


# ---- XLA's own -------------------------------------------------------------------------------------------------------
# XLA's pass ``rematerialization`` computes instructions of the scheduled program again, one at a time, while it needs
# more memory than a limit. For GPUs that is 80% of the device's memory, less arguments and results that are not
# donated, times ``xla_gpu_memory_limit_slop_factor`` in percent (``GetSchedulerMemoryLimit`` in xla/service/gpu). The
# pass counts those too, so they are added to the memory that the compiler is told of. For TPUs the limit is
# ``xla_tpu_max_hbm_size_mib``, if the chip has more; their compiler refuses a program that does not fit.


def compile_within(step: Sharded[..., Any], args: tuple[Any, ...], mesh: Mesh, file: Path) -> None:
    """Compiles a planned step for H100s, without a limit and with XLA's at shares of the memory that it takes."""
    rows = json.loads(file.read_text()) if file.exists() else []
    missing = [share for share in (None, *XLA_SHARES) if all(share != row["share"] for row in rows)]
    if not missing:
        return
    stages = step.stages(*args)
    for share in missing:
        memory = share * rows[0]["memory"] + rows[0]["undonated"] if share else 1e15
        lowered = stages.executable_on(device_mesh(mesh, _h100s(mesh.size, memory / 0.8))).lowered
        options = {"xla_gpu_memory_limit_slop_factor": 100, "xla_gpu_enable_triton_gemm": True}
        try:
            compiled = lowered.compile(options)
        except jax.errors.JaxRuntimeError:  # Triton tiles not every product; cuBLAS has them all
            options["xla_gpu_enable_triton_gemm"] = False
            compiled = lowered.compile(options)
        module = parse_module(compiled.as_text() or "")
        held = compiled.memory_analysis()
        undonated = held.argument_size_in_bytes + held.output_size_in_bytes - 2 * held.alias_size_in_bytes
        row = {"share": share, "memory": compiled_bytes(compiled), "undonated": undonated}
        row |= {
            "flops": product_flops(module),
            "computing": read_schedule(module, mesh).computing,
            "planned": stages.planned.plan.seconds,
            "planned memory": stages.planned.plan.memory,
            "triton": options["xla_gpu_enable_triton_gemm"],
        }
        rows.append(row)
        file.write_text(json.dumps(rows))
        print(file.stem, rows[-1], flush=True)


def compile_within_chips(case: Case, file: Path) -> None:
    """Compiles the plan that keeps everything for the TPUs of its topology, within shares of its memory."""
    if file.exists():
        return
    step, args = case.step(KEEP_ALL, 1e15)
    stages, mesh, rows = step.stages(*args), case.devices, list[dict[str, Any]]()
    devices = device_mesh(mesh, parse_target(V5E).devices(mesh))
    for share in SHARES:
        limit = share * stages.planned.plan.memory
        if limit > mesh.topology.memory:
            continue
        try:
            compiled = stages.executable_on(devices).lowered.compile({"xla_tpu_max_hbm_size_mib": int(limit / 2**20)})
            row = {"memory": compiled_bytes(compiled), "needs": None}
        except jax.errors.JaxRuntimeError as error:
            found = re.search(r"HLO temporaries \(([\d.]+)([MG])\)", str(error))
            if found is None:
                raise
            row = {"memory": None, "needs": float(found[1]) * {"M": 2**20, "G": 2**30}[found[2]]}
        rows.append({"share": share, "limit": limit} | row)
        print(file.stem, rows[-1], flush=True)
    file.write_text(json.dumps(rows))


def _h100s(count: int, memory: float) -> list[jax.Device]:
    """Returns H100s to compile for, whose compiler takes them to have so many bytes."""
    CompileTarget("dgx-h100", (count // 8, 8)).devices(Mesh(data=count))  # loads the compiler
    about = (resources.files("meshdsl.lowering") / "h100.txtpb").read_text()
    about = re.sub(r"device_memory_size: \d+", f"device_memory_size: {memory:.0f}", about)
    found: list[jax.Device] = get_topology_desc(
        "h100", "cuda", topology=f"1x{count // 8}x8", target_config=about
    ).devices
    return found


# ---- Page ------------------------------------------------------------------------------------------------------------


def page(models: list[dict[str, Any]], programs: list[dict[str, Any]], within: dict[str, list[dict[str, Any]]]) -> str:
    """Returns the text of docs/evidence/remat.md.

    Args:
      within: what compilers made within limits, by the name of its file.
    """
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
    by_xla, compiled = ("\n".join(page_section(written, title)).strip() for title in (XLA, COMPILED))
    sections += [made]
    sections += [XLA, _xla_table(within), XLA_TPU, _xla_tpu_table(within)] if within else [by_xla]
    sections += [f"{COMPILED}\n\n{_compiled(programs)}" if programs else compiled]
    return summarised("\n\n".join(sections) + "\n", *_short(models, within))


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
        again = percent_text(row["again"]) + "".join(f", loops of {k} and {LAYERS - k}" for k in row["first"])
        rows.append((row["step"], row["target"], limit, again, *memory, *flops))
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


def _by_xla(programs: list[dict[str, Any]], share: float) -> float:
    """Returns the seconds of the best program that XLA compiled and that fits within a share; infinite if none does.

    Those of the plan, and the computation of the program beyond that of the one without a limit.
    """
    free, *_ = programs
    fits = [row["computing"] for row in programs if row["memory"] <= share * free["memory"]]
    return min((free["planned"] + seconds - free["computing"] for seconds in fits), default=inf)


def _xla_table(within: dict[str, list[dict[str, Any]]]) -> str:
    rows = []
    for name in (*CASES, *STEPS):
        if programs := within.get(f"xla {name}"):
            free, *limited = programs
            fits = {share: seconds for share in SHARES if (seconds := _by_xla(programs, share)) < inf}
            shown = ", ".join(f"{percent_text(share)}: {seconds_text(seconds)}" for share, seconds in fits.items())
            products = "Triton" if free["triton"] else "cuBLAS"
            cells = [_xla_cell(free, row) for share in XLA_SHARES for row in limited if row["share"] == share]
            memory = f"{bytes_text(free['memory'])} ({free['memory'] / free['planned memory']:.2f})"
            rows.append([name, products, memory, *cells, shown or "none"])
    limits = (f"limit of {percent_text(share)}" for share in XLA_SHARES)
    return table(("model", "products", "no limit", *limits, "fits within"), rows)


def _xla_cell(free: dict[str, Any], row: dict[str, Any]) -> str:
    memory, flops = f"{100 * row['memory'] / free['memory']:.1f}%", change_text(row["flops"] / free["flops"] - 1)
    return f"{memory}, FLOPs {flops}, {seconds_text(row['computing'] - free['computing'])}"


def _xla_tpu_table(within: dict[str, list[dict[str, Any]]]) -> str:
    rows = []
    for name in CASES:
        if programs := within.get(f"xla {V5E} {name}"):
            found = {row["share"]: f"fits, {bytes_text(row['memory'])}" for row in programs if row["memory"]}
            found |= {row["share"]: f"needs {bytes_text(row['needs'])}" for row in programs if row["needs"]}
            rows.append([name, *(found.get(share, "") for share in SHARES)])
    return table(("model", *map(percent_text, SHARES)), rows)


def _short(models: list[dict[str, Any]], within: dict[str, list[dict[str, Any]]]) -> list[str]:
    rows = [(model, row) for model in models for row in model["rows"]]

    def counts(others: list[float | None]) -> str:
        """Counts the limits of which there is another step time."""
        pairs = [(row["auto"] or inf, other) for (_, row), other in zip(rows, others, strict=True) if other is not None]
        faster, slower = sum(a < b * (1 - EQUAL) for a, b in pairs), sum(a > b * (1 + EQUAL) for a, b in pairs)
        return f"{faster} faster, {slower} slower" + (f" of {len(pairs)}" if len(pairs) < len(rows) else "")

    policies = [row["best"] or inf for _, row in rows]
    layers = [_per_layer(model, row["share"] * model["plans"][KEEP_ALL][0]) for model, row in rows]
    programs = [
        within.get(f"xla {model['model']}") if CASES[model["model"]].topology == H100 else None for model, _ in rows
    ]
    xla = [found and _by_xla(found, row["share"]) for found, (_, row) in zip(programs, rows, strict=True)]
    best = [least if other is None else min(least, other) for least, other in zip(layers, xla, strict=True)]
    fits = sum(other is not None and other < inf for other in xla)
    gaps = [row["gap"] for _, row in rows if row["gap"] is not None]
    wide, took = sum(gap > GAP for gap in gaps), max(row["took"] for _, row in rows)
    of_xla = f"XLA's own rematerialisation: {counts(xla)} (it fits within {fits}); the best of all: {counts([*best])}."
    return [
        f'At {len(rows)} limits of {len(models)} models, `remat="auto"` beside the best policy of MaxText:',
        f"{counts([*policies])}; the best two policies, each for a part of the layers: {counts([*layers])}.",
        *([of_xla] if within else []),
        f"The largest gap is {percent_text(max(gaps))} ({wide} above 5%), and the longest planning took {took:.0f} s.",
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
- *offloaded*: the best of `qkv_proj_offloaded` and `minimal_offloaded`, which these plans do not
  express, since they are made without `host="auto"`. Derived: the step of the policy that keeps the same values on the
  device, plus their transfers, none of them hidden; the memory of `full`. Not derived where `full` needs more memory
  than the plan that keeps them, since layouts differ.
- *per layer*: the best two of all these, each for a part of the layers. Derived: memory and seconds of the plans
  without a limit, in that proportion.
- *remat="auto"*: on the step without `jax.checkpoint`. *gap*: of the layouts, given what is computed again. What is
  computed again is found by a search without a bound."""
EARLIER = """Rows of an earlier search for what is computed again, which may be slower than plans found since:"""
XLA = """## XLA's own rematerialisation

The plan that keeps everything, made and compiled for H100s (jax-cuda12-plugin), without a limit and with XLA's at
shares of the memory that the program then takes:

- *no limit*: the program's memory, and how many times the plan's that is.
- *limit of*: memory beside the program without a limit, change of the FLOPs of products, and seconds of computation
  more, read from the program's schedule at the prices of the topology.
- *fits within*: shares that one of these programs fits, and the step time: the plan's, and those seconds.

The compiler has no devices on which to choose products: it takes Triton's, or cuBLAS where those fail to compile. The
last two rows are the steps of the next section.

The pass (`xla/hlo/transforms/simplifiers/hlo_rematerialization.cc`) runs over the scheduled program. On GPUs it
computes one instruction at a time again, never a loop or a library's call, and only within a computation: what a loop
over layers stacks for the backward pass is a result of the loop, so it stays. Inside of both loops' bodies it still
computes fusions again, since the limit is exceeded there too, which costs time and saves nothing. Where the memory
falls, most of it does because XLA orders the program otherwise within a limit; only in ResNet-50, whose stages begin
outside of loops, because the pass computes again. There it meets the limit of 90% by its own count, and the compiled
program just misses it.

Programs take 0.91 to 1.04 times what their plans say, of the models. Until this was measured, it was up to 1.56 times:
seven plans were made for TPUs, whose compiler stores operands of products in 16 bits; XLA held stacks twice where two
loops read them in different orders of dims (`lowering/stack_order.py`: gpt3-175b took 610 GB, llama3-405b 615 GB,
mamba-130m 208 GB); and temporary values of functions with a rule, such as attention, were not counted."""
XLA_TPU = f"""The same for {V5E} (libtpu, with `xla_tpu_max_hbm_size_mib` as limit), at shares of the plan's memory that
are less than a chip has. The compiler refuses a program that does not fit, with the size of its temporary values:"""
COMPILED = f"""## Compiled

{LAYERS} layers of two products, {WIDTH} and {2 * WIDTH} wide, {ROWS:,} rows in float32 on 8 devices: memory and FLOPs
of products per device, of the plan and of the compiled program. If a compiler merged what is computed twice, its FLOPs
would be fewer. *Computed again* is the share of the step's seconds, and the iterations of a loop that is divided.
Unrolled layers on GPUs take less than planned if nothing is computed again, and programs for TPUs take less everywhere.
Limits within which nothing fits have no row."""

if __name__ == "__main__":
    main()
