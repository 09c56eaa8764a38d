"""Size and load time of HTML reports in headless Chromium, from the demo's plan to one of 50,000 operations.

python -m bench.pages

Needs playwright and a Chromium. First contentful paint as the browser reports it; medians of five loads.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from shutil import which
from statistics import median

import jax
import jax.numpy as jnp
import optax
from playwright.sync_api import Browser, sync_playwright

from bench.example_steps import load_example
from bench.models import TOPOLOGY
from bench.models import Case as Large
from bench.report import table, versions
from meshdsl import models
from meshdsl.api import parallelize
from meshdsl.layouts.mesh import Mesh
from meshdsl.plan.plan import Plan
from meshdsl.plan.report import report_html
from meshdsl.schedules.spec import Pipeline
from meshdsl.util.text import bytes_text

LOADS, LAYERS, WIDTH, BATCH = 5, 1130, 256, 64
HEADER = ("plan", "mesh", "operations", "file", "written in, s", "first paint, ms", "whole page, ms")
PAINTED = "performance.getEntriesByName('first-contentful-paint').length > 0"
PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
LOADED = "performance.getEntriesByType('navigation')[0].loadEventEnd"


def demo() -> Plan:
    """Returns the plan of the README's GPT."""
    program = load_example("gpt").program
    return parallelize(program.step, Mesh.parse("data=4,model=2"), layouts=program.layouts).plan(*program.args)


def large(case: Large) -> Plan:
    """Returns the plan of a model of ``models/`` under the strategy of ``bench.models``."""
    program = models.build(case.model, "fsdp+tensor", batch=case.batch)
    pipeline = Pipeline(case.microbatches) if case.microbatches else None
    mesh = Mesh.parse(case.mesh, TOPOLOGY)
    return parallelize(program.step, mesh, rules=case.rules, pipeline=pipeline).plan(*program.args)


def deep() -> Plan:
    """Returns the plan of a step with unrolled layers: about 50,000 operations and thousands of parameters."""
    optimizer = optax.adam(1e-3)

    def loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in params:
            x = x + jax.nn.gelu(x @ w)
        return jnp.mean(x**2)

    def step(params, state, x):
        gradients = jax.grad(loss)(params, x)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state

    params = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS
    args = params, jax.eval_shape(optimizer.init, params), jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
    return parallelize(step, Mesh.parse("data=8,model=8", TOPOLOGY), {"x": "data=S(0)"}).plan(*args)


PLANS: dict[str, Callable[[], Plan]] = {
    "demo": demo,
    "llama3-70b": lambda: large(Large("llama3-70b", 256, "data=64,model=8")),
    "llama3-70b, 8 stages": lambda: large(Large("llama3-70b", 512, "pipe=8,data=8,model=8", 32)),
    "deep": deep,
}


def main() -> None:
    """Prints the table."""
    chromium = next(filter(None, map(which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        rows = [_row(name, make(), browser) for name, make in PLANS.items()]
        version = browser.version
    print(f"{table(HEADER, rows)}\n{versions()}, Chromium {version}")


def _row(name: str, plan: Plan, browser: Browser) -> tuple[object, ...]:
    start = time.process_time()
    page = report_html(plan)
    seconds = time.process_time() - start
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.html"
        file.write_text(page, encoding="utf-8")
        loads = [_load(browser, file.as_uri()) for _ in range(LOADS)]
    paint, whole = (median(times) for times in zip(*loads, strict=True))
    operations = sum(plan.operations.values())
    return name, plan.mesh, operations, bytes_text(len(page.encode())), f"{seconds:.1f}", f"{paint:.0f}", f"{whole:.0f}"


def _load(browser: Browser, url: str) -> tuple[float, float]:
    """Returns milliseconds to the first contentful paint and to the load event."""
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.goto(url)
    while not page.evaluate(PAINTED):  # the page's content security policy forbids wait_for_function
        page.wait_for_timeout(50)
    times = page.evaluate(f"[{PAINT}, {LOADED}]")
    page.close()
    return times[0], times[1]


if __name__ == "__main__":
    main()
