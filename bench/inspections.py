"""Inspects public training programs as they are, and writes docs/evidence/inspections.md.

python -m bench.inspections [name ...] --checkouts FOLDER

The programs are those of ``bench.programs``: steps of others with the batch split over ``data``, and programs that
state shardings themselves, inspected at the first call of their own jitted step. Each is measured in a process of its
own; results are cached in .cache/inspections.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from bench.programs import REGISTRY, STATED, adapters
from bench.programs.adapter import Adapter
from bench.programs.steps import jitted_step
from bench.report import summarised, table, versions
from meshdsl.api.inspect import inspect
from meshdsl.errors import ArgumentError
from meshdsl.layouts.mesh import Mesh
from meshdsl.util.text import bytes_text

MESH, TOPOLOGY = "data=4,model=2", "dgx-h100"
SPLIT = (
    "haiku_lm",
    "nanogpt",
    "equinox_gpt",
    "gemma",
    "conformer",
    "s4",
    "sac",
    "vit",
    "dit",
    "imagenet",
    "lora",
    "ppo",
)
LINES, STATEMENTS = 4, 2  # shown of a program
HALF = 0.55  # of the bytes


def main() -> None:
    """Inspects the selected programs and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = adapters({**STATED, **{name: REGISTRY[name] for name in SPLIT}})
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(known)}; all by default")
    parser.add_argument("--checkouts", type=Path, help="the folder of checkouts, each as name or owner+name")
    parser.add_argument("--results", type=Path, default=Path(".cache/inspections"), help="folder of cached results")
    parser.add_argument("--page", type=Path, default=Path("docs/evidence/inspections.md"))
    parser.add_argument("--in-process", action="store_true", help="inspect one program in this process")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in known]
    if unknown:
        parser.error(f"no program {unknown[0]!r}; known: {', '.join(known)}")
    names = options.names or list(known)
    if options.in_process:
        jax.config.update("jax_num_cpu_devices", 8)
        found = measured(names[0], known[names[0]], options.checkouts)
        (options.results / f"{names[0]}.json").write_text(json.dumps(found, indent=1))
        return
    options.results.mkdir(parents=True, exist_ok=True)
    for name in names if options.checkouts else ():
        if known[name].checkout(options.checkouts) is None:
            print(f"{name}: no checkout of github.com/{known[name].repository} in {options.checkouts}", flush=True)
            continue
        folders = ["--checkouts", str(options.checkouts), "--results", str(options.results)]
        status = subprocess.run([sys.executable, "-m", "bench.inspections", name, "--in-process", *folders]).returncode
        print(f"{name}: {f'exit status {status}' if status else 'inspected'}", flush=True)
    files = {name: options.results / f"{name}.json" for name in known}
    facts = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
    options.page.write_text(page(known, facts))


# ---- Measured --------------------------------------------------------------------------------------------------------


def measured(name: str, adapter: Adapter, checkouts: Path) -> dict[str, Any]:
    """Returns the facts of one program at small size."""
    with adapter.importable(adapter.checkout(checkouts)):
        if name in STATED:
            build: Callable[..., dict[str, Any]] = adapter.build
            return build("small", inspected)
        step, args = jitted_step(adapter.build("small"), Mesh.parse(MESH))
        return inspected(step, args)


def inspected(step: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    """Returns what a jitted step communicates, and what would bring it to the plan."""
    found = inspect(step, *args, topology=TOPOLOGY)
    facts = {**found.facts, "versions": versions()}
    try:
        return {**facts, "compared": found.compare().facts}
    except ArgumentError as error:
        return {**facts, "not compared": str(error)}


# ---- Page ------------------------------------------------------------------------------------------------------------

INTRO = f"""# Inspections of public programs

What training steps that others published send, as `md.inspect` reads it from the compiled program, and what would bring
them to the best plan between the same inputs and outputs; measured by `make inspections CHECKOUTS=folder`. No code of
theirs is in this repository.

* Programs that state shardings themselves are run up to the first call of their own jitted step: {", ".join(STATED)}.
  MaxText's is the one that it compiles ahead of time, with stubs for packages that the step does not use.
  Of the others, the step is jitted with the batch split over `data` of `{MESH}`, and all else whole on every device.
* At small size, for the speeds of {TOPOLOGY}, compiled by XLA for CPU devices, which sends bfloat16 as float32.
  What compilers for GPUs and TPUs make of these programs was not measured.
* **plan** is the fastest that computes no more than the program. **with statements**: the step compiled once more, with
  `with_sharding_constraint` on the values of the lines named below. **other ends**: compiled once more with arguments
  and results split that lie whole on every device (`in_shardings`, `out_shardings`).
"""


def page(programs: Mapping[str, Adapter], found: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the page of the facts by program."""
    header = (
        "program",
        "what",
        "mesh",
        "sends",
        "plan",
        "with statements",
        "other ends",
        "least / sent",
        "why not half",
    )
    rows = [(name, programs[name].what, *_row(facts)) for name, facts in found.items()]
    parts = [INTRO, table(header, rows), ""]
    for name, facts in found.items():
        parts += [f"## {name}", "", *_program(programs[name], facts), ""]
    parts.append(f"Measured with {next(iter(found.values()))['versions']}." if found else "")
    halved = [name for name, facts in found.items() if _least(facts) < HALF * facts["bytes"]]
    short = f"{len(found)} public training programs inspected as they are: in {len(halved)} the suggested statements or"
    reason = (
        "for each of the others, the page says what the plan sends instead, and what constraints cannot state of it."
    )
    return summarised(
        "\n".join(parts).rstrip() + "\n", f"{short} layouts of arguments halve the bytes, compiled;", reason
    )


def _least(facts: Mapping[str, Any]) -> float:
    """The fewest bytes that the step was compiled to send."""
    compared = facts.get("compared") or {}
    ends = compared.get("free_ends") or {}
    known = (facts["bytes"], compared.get("constrained_bytes"), ends.get("bytes"))
    return min(x for x in known if x is not None)


def _row(facts: Mapping[str, Any]) -> tuple[str, ...]:
    compared = facts.get("compared")
    if compared is None:
        return facts["mesh"], bytes_text(facts["bytes"]), "", "", "", "", facts["not compared"].splitlines()[0]
    after, ends = compared["constrained_bytes"], compared["free_ends"]
    stated = bytes_text(after) if after is not None and after < facts["bytes"] else "no fewer"
    elsewhere = bytes_text(ends["bytes"]) if ends else "no fewer"
    part = _least(facts) / facts["bytes"] if facts["bytes"] else 1.0
    sizes = bytes_text(facts["bytes"]), bytes_text(compared["plan"]["bytes"]), stated, elsewhere
    return facts["mesh"], *sizes, f"{part:.2f}", "" if part <= HALF else _reason(facts)


def _reason(facts: Mapping[str, Any]) -> str:
    """Why no statement halves the bytes, from the facts."""
    ratio, plan = facts["compared"]["ratio"], facts["compared"]["plan"]
    if not facts["bytes"]:
        return "nothing is sent" + (": every device computes the same" if facts["compared"]["repeated"] else "")
    if ratio <= 1.05:
        reduced = sum(c["bytes"] * c["trips"] for c in facts["collectives"] if c["kind"] == "all-reduce")
        share = f"{reduced / facts['bytes']:.0%} are all-reduces"
        work = f", and computes {plan['flops'] / facts['flops']:.0%}" if plan["flops"] < 0.95 * facts["flops"] else ""
        return f"the plan sends no less{work}: {share}"
    partial = sum(line["partial"] for line in facts["compared"]["lines"][:LINES])
    kept = f", and keeps {partial} partial sums on the worst lines, which no constraint can state" if partial else ""
    return f"the plan sends {1 / ratio:.0%} of it{kept}"


def _program(adapter: Adapter, facts: Mapping[str, Any]) -> Iterator[str]:
    link = f"[{adapter.repository}](https://github.com/{adapter.repository}/tree/{adapter.commit})"
    yield f"{link}, step `{facts['name']}`"
    yield ""
    sums: dict[tuple[str, ...], list[int]] = {}
    for c in facts["collectives"]:
        key = c["source"], c["kind"], ",".join(c["axes"]) or f"groups of {c['group']}", c["note"]
        entry = sums.setdefault(key, [0, 0])
        entry[0] += c["bytes"] * c["trips"]
        entry[1] += c["trips"]
    order = sorted(sums.items(), key=lambda each: -each[1][0])
    rows = [(bytes_text(size), runs, *key[1:3], f"`{key[0]}`", key[3]) for key, (size, runs) in order[:LINES]]
    yield table(("sent", "runs", "collective", "axes", "line", "waste"), rows)
    rest = sum(size for _, (size, _) in order[LINES:])
    if rest:
        yield f"\nIn {len(order) - LINES} more rows {bytes_text(rest)}."
    yield from _statements(facts.get("compared"))


def _statements(compared: Mapping[str, Any] | None) -> Iterator[str]:
    if compared is None:
        return
    for line in compared["repeated"][:1]:
        count = len(compared["repeated"])
        lines = f"{count} lines, most on" if count > 1 else "line"
        over = f" of `{','.join(line['axes'])}`" if line["axes"] else ""
        yield f"\nDuplicated compute on {lines} `{line['source']}`: {line['times']} devices{over} alike."
    helping = [line for line in compared["lines"] if line["source"] in compared["constrained"]]
    if helping and compared["constrained_bytes"] is not None:
        yield "\nStatements that help:\n"
        for line in helping:
            yield from (f"* `{statement}`" for statement in line["statements"][:STATEMENTS])
            if len(line["statements"]) > STATEMENTS:
                yield f"* and {len(line['statements']) - STATEMENTS} more values of `{line['source']}`"
    if ends := compared["free_ends"]:
        shown = list(ends["arguments"].items())
        yield f"\nArguments that had better lie split ({len(shown)}):\n"
        yield from (f"* `{path}`: `{spec}`" for path, spec in shown[:STATEMENTS])


if __name__ == "__main__":
    main()
