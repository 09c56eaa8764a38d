"""Training steps on one GPU: time and memory, predicted and measured; writes docs/evidence/gpu.md.

python -m bench.gpu [MODEL ...] [--steps 15] [--page]

Each model is trained on the first device at hand, in variants: as it is under ``jax.jit``; planned, where keeping
everything fits; planned within shares of that memory with ``remat="auto"``; under policies of MaxText and ``jax.jit``;
and with the optimizer's state in the memory of the host. Every variant is a process of its own, so that the peak of its
memory is its own. A few at a time are planned and compiled side by side, then run one by one. A last process runs the
planned program and that of ``jax.jit`` in turns, for the ratio of their times. Results are cached in .cache/gpu, one
file per model; ``--page`` only writes the page.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from bench.remat import POLICIES
from bench.report import interleave, machine, page_section, ratio, summarised, table
from meshdsl.api import Program, Sharded, parallelize
from meshdsl.errors import MeshDSLError, nearest
from meshdsl.layouts.mesh import Mesh
from meshdsl.models import gpt, llama, recurrent, resnet, t5, vit
from meshdsl.util.text import bytes_text, percent_text, seconds_text

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "evidence" / "gpu.md"
CACHE = ROOT / ".cache" / "gpu"
SHARES = (0.75, 0.5, 0.35)
TRACED = 3  # steps
AT_ONCE = 5  # processes that plan and compile
BF16 = {"dtype": "bfloat16"}

CASES: dict[str, tuple[ModuleType, Any, dict[str, int]]] = {
    "gpt2-124m": (gpt, replace(gpt.CONFIGS["gpt2-124m"], **BF16), {"batch": 16}),
    "gpt2-124m-50304": (gpt, replace(gpt.CONFIGS["gpt2-124m"], vocab=50304, **BF16), {"batch": 16}),
    "gpt2-774m": (gpt, replace(gpt.CONFIGS["gpt2-774m"], **BF16), {"batch": 4}),
    "llama-1b": (llama, llama.Config(16, 2048, 8192, 32, 8, seq=2048, vocab=32000, **BF16), {"batch": 2}),
    "vit-l": (vit, vit.CONFIGS["vit-l"], {"batch": 64}),
    "t5-large": (t5, t5.CONFIGS["t5-large"], {"batch": 16}),
    "resnet50": (resnet, resnet.CONFIGS["resnet50"], {"batch": 256}),
    "mamba-130m": (recurrent, replace(recurrent.CONFIGS["mamba-130m"], remat="none"), {"batch": 2}),
}
PLAIN, PLANNED, HOST, BOTH = "jax.jit", "planned", "host", "both"
VARIANTS = (
    PLAIN,
    PLANNED,
    *(f"auto {share}" for share in SHARES),
    *(f"policy {name}" for name in ("full", "minimal_with_context")),
    HOST,
)
POLICY, AUTO = "policy ", "auto "
WIDER = "-50304"  # ends the name of a case that is another one with a longer vocabulary
PRODUCT = re.compile(r"gemm|nvjet|cutlass|xmma|cublas|cudnn|conv|wgrad|dgrad|fprop|dot", re.IGNORECASE)
COPY = re.compile(r"memcpy|memset", re.IGNORECASE)
Facts = dict[str, Any]


def main() -> None:
    """Measures the models and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--steps", type=int, default=15, help="that are timed; default: 15")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop to start measurements after so long")
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    parser.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := [name for name in options.models if name not in CASES]:
        parser.error(f"no model {unknown[0]!r}{nearest(unknown[0], CASES)}")
    if options.variant:
        Variant(options.models[0], options.variant, options.steps).run(options.compile)
        return
    if not options.page:
        if (platform := first_platform()) != "gpu":
            parser.error(f"needs a GPU: the first device of jax is of platform {platform!r}")
        CACHE.mkdir(parents=True, exist_ok=True)
        measure(options.models or list(CASES), options.steps, options.seconds)
    found = [json.loads(file.read_text()) for name in CASES if (file := CACHE / f"{name}.json").exists()]
    if not found:
        parser.error("no results in .cache/gpu; run python -m bench.gpu MODEL first")
    PAGE.write_text(page(found))


def first_platform() -> str:
    """Returns the platform of the first device, found by another process: this one takes no memory of a GPU."""
    command = [sys.executable, "-c", "import jax; print(jax.devices()[0].platform)"]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout.strip()


# ---- Measuring -------------------------------------------------------------------------------------------------------


def measure(models: Sequence[str], steps: int, limit: float) -> None:
    """Has every variant of the models compiled, several at once, and then run one by one by processes of their own."""
    start = time.monotonic()
    programs = tempfile.TemporaryDirectory()  # compiled by one process, run by another, whose memory is then its own
    settings = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}
    settings |= {"JAX_COMPILATION_CACHE_DIR": programs.name, "TF_CPP_MIN_LOG_LEVEL": "3"}
    settings |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    jobs = [(name, variant) for name in models for variant in (*VARIANTS, BOTH)]

    def process(name: str, variant: str, *more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "bench.gpu", name, "--variant", variant, "--steps", str(steps), *more]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        return subprocess.Popen(command, **pipes, env=os.environ | settings, text=True)

    def compile_one(job: tuple[str, str]) -> None:
        out, _ = process(*job, "--compile").communicate("go\n")
        print(round(time.monotonic() - start), *job, "compiled", out.strip()[-200:], flush=True)

    with ThreadPoolExecutor(AT_ONCE) as pool:  # the plain programs first: others take over how their kernels are tuned
        list(pool.map(compile_one, [job for job in jobs if job[1] == PLAIN]))
        list(pool.map(compile_one, [job for job in jobs if job[1] not in (PLAIN, BOTH)]))
    in_time = takewhile(lambda job: time.monotonic() <= start + limit, jobs)
    for (name, variant), running in ahead(in_time, process):
        if time.monotonic() > start + limit:
            running.kill()
            continue
        try:
            out, _ = running.communicate("go\n", timeout=120)
        except (subprocess.TimeoutExpired, BrokenPipeError) as error:
            running.kill()
            out = json.dumps({"error": type(error).__name__})
        facts = json.loads(out.strip().splitlines()[-1]) if out.strip() else {"error": "no result"}
        file = CACHE / f"{name}.json"
        known = json.loads(file.read_text()) if file.exists() else {"model": name, "variants": {}}
        known["variants"][variant] = facts
        file.write_text(json.dumps(known))
        print(round(time.monotonic() - start), name, variant, json.dumps(facts)[:500], flush=True)


def ahead(
    jobs: Iterable[tuple[str, str]], process: Callable[[str, str], subprocess.Popen[str]]
) -> Iterator[tuple[tuple[str, str], subprocess.Popen[str]]]:
    """Yields jobs with their processes, while those of the next ones plan."""
    waiting = deque[tuple[tuple[str, str], subprocess.Popen[str]]]()
    for job in jobs:
        waiting.append((job, process(*job)))
        if len(waiting) == AT_ONCE:
            yield waiting.popleft()
    yield from waiting


class Variant:
    """A model's step in one variant, in a process of its own.

    Args:
      model: a key of ``CASES``.
      name: of the variant.
      steps: that are timed.
    """

    def __init__(self, model: str, name: str, steps: int) -> None:
        self.model, self.name, self.steps = model, name, steps

    def run(self, only_compile: bool) -> None:
        """Plans, waits for a line of input, compiles, and prints what it measures as a line."""
        facts: Facts = {}
        try:
            compile_step, facts = (self.both if self.name == BOTH else self.single)()
            sys.stdin.readline()
            measure_step = compile_step(facts)
            if not only_compile:
                facts |= measure_step()
        except (MeshDSLError, jax.errors.JaxRuntimeError) as error:
            facts["error"] = str(error).splitlines()[0][:300]
        print(json.dumps(facts | {"machine": machine()}), flush=True)

    def program(self) -> Program:
        """Returns the step, with what its backward pass keeps."""
        module, config, sizes = CASES[self.model]
        options = {"remat": "none", "keep": ""}
        if self.name.startswith(POLICY):
            options = {"remat": "all", "keep": POLICIES[self.name.removeprefix(POLICY)]}
        return module.program(replace(config, **options), "", **sizes)

    def sharded(self, program: Program, **options: Any) -> Sharded:
        """Returns the planned step on one device."""
        return parallelize(program.step, Mesh(data=1), rules=program.rules, donate_argnums=donated(program), **options)

    def single(self) -> tuple[Callable[[Facts], Callable[[], Facts]], Facts]:
        """Returns a function that compiles the step and returns one that runs it, and what is known before."""
        program = self.program()
        facts: Facts = {}
        if self.name.startswith(AUTO):
            most = self.sharded(program, memory="10TB").plan(*program.args).memory
            share = float(self.name.removeprefix(AUTO))
            sharded = self.sharded(program, memory=share * most, remat="auto")
            facts["limit"] = share * most
        elif self.name == HOST:
            sharded = self.sharded(program, memory="10TB", layouts={f"{state_name(program)}/**": "@host"})
        else:
            sharded = self.sharded(program, memory="10TB")
        facts |= plan_facts(sharded, program)
        plain = self.name == PLAIN or self.name.startswith(POLICY)
        step = jax.jit(program.step, donate_argnums=donated(program)) if plain else sharded
        lowered = step.lower(*program.args)

        def compile_step(facts: Facts) -> Callable[[], Facts]:
            start = time.monotonic()
            compiled = lowered.compile()
            facts["compile"] = time.monotonic() - start
            facts["compiled"] = compiled_memory(compiled)
            facts["kernels"] = kernels(compiled.as_text())
            shardings = None if plain else sharded.input_shardings(*program.args)[0]
            call = compiled if plain else from_leaves(compiled, program)
            return lambda: timed(call, program, shardings, self.steps)

        return compile_step, facts

    def both(self) -> tuple[Callable[[Facts], Callable[[], Facts]], Facts]:
        """Returns a function that returns one that runs the planned step and that of ``jax.jit`` in turns."""
        program = self.program()
        ours = self.sharded(program, memory="10TB")
        ours.plan(*program.args)
        calls = {PLANNED: ours, PLAIN: jax.jit(program.step, donate_argnums=donated(program))}

        def run() -> Facts:
            steps = {name: Stepper(call, arguments(program)) for name, call in calls.items()}
            losses = {name: [first_result(step()) for _ in range(3)] for name, step in steps.items()}
            seconds = interleave(steps, self.steps)
            return {"ratio": str(ratio(seconds[PLANNED], seconds[PLAIN])), "losses": losses}

        return lambda facts: run, {}


def first_result(results: Any) -> float:
    """Returns the first number of a step's last result."""
    return float(jnp.ravel(jax.tree.leaves(results)[-1])[0])


def donated(program: Program) -> tuple[int, ...]:
    """Returns the positions of a step's arguments that it replaces: all but the batch."""
    return tuple(range(len(program.args) - 1))


def state_name(program: Program) -> str:
    """Returns the name of the optimizer's state among the arguments of a step."""
    code = program.step.__code__
    return code.co_varnames[len(program.args) - 2]


def plan_facts(sharded: Sharded, program: Program) -> Facts:
    """Returns what a plan predicts."""
    start = time.process_time()
    plan = sharded.plan(*program.args)
    again = plan.recomputation.seconds if plan.recomputation else 0.0
    return {
        **{"predicted": plan.seconds, "simulated": plan.simulated_seconds, "planned": plan.memory, "again": again},
        **{"planning": time.process_time() - start, "topology": plan.mesh.topology.name},
    }


def compiled_memory(compiled: Any) -> int:
    """Returns bytes of arguments, results and temporaries; donated arguments count once."""
    found = compiled.memory_analysis()
    own = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return own + found.temp_size_in_bytes


def kernels(text: str) -> int:
    """Returns how many kernels the text of a module names, each once however often it runs."""
    return len(re.findall(r" (?:fusion|custom-call)\(", text))


def from_leaves(compiled: Any, program: Program) -> Callable[..., Any]:
    """Returns the step of a compiled program of leaves."""
    tree = jax.tree.structure(jax.eval_shape(program.step, *program.args))
    return lambda *args: jax.tree.unflatten(tree, compiled(*jax.tree.leaves(args)))


class Stepper:
    """Advances a step's own state; donated arguments are replaced by the results in their place.

    Args:
      step: ``step(*state, batch) -> (*state, ...)``.
      args: the first arguments.
    """

    def __init__(self, step: Callable[..., Any], args: Sequence[Any]) -> None:
        self.step, self.args = step, list(args)

    def __call__(self) -> Any:
        """Returns the results of a step that do not replace arguments."""
        results = self.step(*self.args)
        count = len(self.args) - 1
        self.args[:count] = results[:count]
        return results[count:]


def timed(compiled: Any, program: Program, shardings: Any, steps: int) -> Facts:
    """Returns the median seconds of a compiled step, its peak memory, and what its kernels are."""
    step = Stepper(compiled, arguments(program, shardings))
    for _ in range(3):
        jax.block_until_ready(step())
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        jax.block_until_ready(step())
        seconds.append(time.perf_counter() - start)
    start = time.perf_counter()
    for _ in range(steps):
        result = step()
    jax.block_until_ready((result, step.args))
    steady = (time.perf_counter() - start) / steps
    stats = jax.devices()[0].memory_stats() or {}
    facts = {"measured": statistics.median(seconds), "fastest": min(seconds), "steady": steady}
    return facts | {"peak": stats.get("peak_bytes_in_use"), "traced": traced(step)}


def arguments(program: Program, shardings: Any = None) -> Any:
    """Returns random arguments of a step, made on the device: floats from 0 to 0.02, integers below 100."""

    def make() -> Any:
        key = jax.random.key(0, impl="unsafe_rbg")
        draw = lambda x: (  # noqa: E731
            jax.random.uniform(key, x.shape, x.dtype, 0.0, 0.02)
            if jnp.issubdtype(x.dtype, jnp.floating)
            else jax.random.randint(key, x.shape, 0, 100).astype(x.dtype)
        )
        return jax.tree.map(draw, program.args)

    made = jax.jit(make)()
    return made if shardings is None else jax.device_put(made, shardings)


def traced(step: Callable[[], Any]) -> Facts:
    """Returns seconds and starts per step of the device's products, copies and other kernels, by the profiler."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(TRACED):
                jax.block_until_ready(step())
        files = list(Path(folder).rglob("*.xplane.pb"))
        found = {kind: [0.0, 0.0] for kind in ("products", "copies", "others")}
        names: dict[str, float] = {}
        for file in files:
            for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
                if not plane.name.startswith("/device:GPU"):
                    continue
                for line in plane.lines:
                    if not line.name.startswith("Stream"):
                        continue
                    for event in line.events:
                        kind = (
                            "copies"
                            if COPY.search(event.name)
                            else "products"
                            if PRODUCT.search(event.name)
                            else "others"
                        )
                        found[kind][0] += event.duration_ns * 1e-9 / TRACED
                        found[kind][1] += 1 / TRACED
                        names[event.name] = names.get(event.name, 0.0) + event.duration_ns * 1e-9 / TRACED
    most = sorted(names.items(), key=lambda each: -each[1])[:60]
    return found | {"most": [(name[:100], seconds) for name, seconds in most]}


# ---- Page ------------------------------------------------------------------------------------------------------------


def page(models: list[Facts]) -> str:
    """Returns the text of docs/evidence/gpu.md; sections below the tables are written by hand and stay."""
    header = ("model", "limit", "variant", "predicted", "measured", "error", "products", "copies", "other kernels")
    header += ("planned memory", "peak memory", "peak / planned")
    rows = [row for fact in models for row in _rows(fact)]
    cases = [(f"`{fact['model']}`", CASES[fact["model"]][2]["batch"], _ratio(fact)) for fact in models]
    made = sorted({each["machine"] for fact in models for each in fact["variants"].values() if "machine" in each})
    parts = [
        INTRODUCTION,
        table(("model", "batch", "planned / `jax.jit` (95%)"), cases),
        table(header, rows),
        f"`python -m bench.gpu`, {'; '.join(made)}",
    ]
    if missing := [*_missing({fact["model"]: fact["variants"] for fact in models})]:
        parts.append(f"Not run: {'; '.join(missing)}.")
    written = PAGE.read_text() if PAGE.exists() else ""
    parts += ["\n".join(page_section(written, title)).strip() for title in WRITTEN]
    text, short = "\n\n".join(filter(None, parts)) + "\n", [*_short(models)]
    return summarised(text, *short) if short else text


def _missing(named: Mapping[str, Facts]) -> Iterator[str]:
    """Yields the models that were not run, and those that were not in a variant."""
    if names := [f"`{name}`" for name in CASES if name not in named]:
        yield ", ".join(names)
    for variant in VARIANTS:
        if names := [f"`{name}`" for name, variants in named.items() if variant not in variants]:
            yield f"{', '.join(filter(None, _named(variant)))}: {', '.join(names)}"


def _named(variant: str) -> tuple[str, str]:
    """Returns the name of a variant and its limit, if it has one."""
    if variant.startswith(AUTO):
        return 'planned, `remat="auto"`', percent_text(float(variant.removeprefix(AUTO)))
    return NAMES.get(variant) or f"`{variant.removeprefix(POLICY)}`, `jax.jit`", ""


def _rows(fact: Facts) -> Iterator[list[str]]:
    for variant, found in fact["variants"].items():
        if variant == BOTH:
            continue
        name, limit = _named(variant)
        if not _ran(found):
            yield [f"`{fact['model']}`", limit, name, "none", *[""] * 8]
            continue
        predicted, measured, peak = found["predicted"], found["measured"], _peak(found)
        kernels = [f"{1e3 * found['traced'][kind][0]:.1f} ms" for kind in ("products", "copies", "others")]
        memory = bytes_text(found["planned"]), bytes_text(peak), f"{peak / found['planned']:.2f}"
        times = seconds_text(predicted), seconds_text(measured), f"{predicted / measured - 1:+.0%}"
        yield [f"`{fact['model']}`", limit, name, *times, *kernels, *memory]


def _peak(found: Facts) -> float:
    return found["peak"] or found["compiled"]


def _ratio(fact: Facts) -> str:
    return fact["variants"].get(BOTH, {}).get("ratio", NOT_RUN)


def _short(models: list[Facts]) -> Iterator[str]:
    """Yields what the tables say in short, of what ran."""
    ran = [(fact["model"], name, each) for fact in models for name, each in fact["variants"].items() if _ran(each)]
    cases = {model for model, _, _ in ran}
    trained = len({model.removesuffix(WIDER) for model in cases})
    ratios = [float(text.split()[0]) for fact in models if (text := _ratio(fact)) != NOT_RUN]
    errors = [each["predicted"] / each["measured"] - 1 for _, name, each in ran if name == PLANNED]
    over = [_peak(each) / each["limit"] for _, _, each in ran if "limit" in each]
    if ran:
        in_cases = "" if trained == len(cases) else f", in {len(cases)} cases"
        yield f"{trained} model{'s' * (trained > 1)} trained on one GPU{in_cases}."
    if ratios:
        steps = f"{min(ratios):.2f} to {max(ratios):.2f}"
        yield f"The planned step takes {steps} of the time of `jax.jit`, with everything kept."
    if errors:
        apart = f"{min(errors):+.0%} to {max(errors):+.0%}"
        yield f"Steps that keep everything are predicted {apart} off the measured ones."
    if over:
        peaks = f"{min(over):.2f} to {max(over):.2f}"
        yield f'With `remat="auto"`, peak memory is {peaks} of the limit, at {len(over)} limits.'


def _ran(found: Facts) -> bool:
    return "measured" in found


NAMES = {PLAIN: "`jax.jit`", PLANNED: "planned, keep all", HOST: "planned, optimizer state on the host"}
NOT_RUN = "not run"
WRITTEN = ("## What the differences are",)
INTRODUCTION = """# Steps on a GPU

Training steps of our models on one H100, with AdamW and random data: language models in bfloat16, `vit-l`, `t5-large`
and `resnet50` in float32 (TF32). One device sends nothing; this is about computing, memory and the host.

- *planned / `jax.jit`*: time of a step with everything kept, both in one process in turns, Python included. Losses of
  the first three steps were equal, or apart in the seventh digit.
- *limit*: of memory for `remat="auto"`, as a share of what the plan that keeps everything needs.
- *policies*: `jax.checkpoint` around each layer, with values kept by name as in MaxText ([recomputation](remat.md)).
- *predicted*: `plan.seconds` with the preset of the topology that was found; nothing is fitted to these runs.
- *products*, *copies*, *other kernels*: seconds on the device per step, by the profiler's names of kernels.
- *peak memory*: of the device's allocator, in a process of its own."""

if __name__ == "__main__":
    main()
