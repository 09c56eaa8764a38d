"""``meshdsl plan``, ``diff``, ``check`` and ``verify``: what a program communicates, before anything runs."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshdsl.cli.common import (
    AsJSON,
    Chunks,
    MemoryText,
    MeshText,
    Microbatches,
    ProgramName,
    Recompute,
    RulesText,
    ScheduleName,
    TopologyName,
    check_folders,
    load_mesh,
    load_program,
    progress,
    show,
)

if TYPE_CHECKING:
    from meshdsl.api import Program

PlanFile = Annotated[Path, typer.Argument(help="a plan that was saved", show_default=False)]


def plan(
    program: ProgramName,
    mesh: MeshText = "data=4,model=2",
    topology: TopologyName = "cpu",
    rules: RulesText = None,
    memory: MemoryText = None,
    microbatches: Microbatches = None,
    schedule: ScheduleName = None,
    chunks: Chunks = None,
    recompute: Recompute = None,
    save: Annotated[Path | None, typer.Option(help="keep the plan in this file")] = None,
    html: Annotated[Path | None, typer.Option(help="draw the plan in this file, an HTML page")] = None,
    as_json: AsJSON = False,
) -> None:
    """Plan a program's step and print the plan: layouts, collectives and why, seconds, memory, gap."""
    check_folders(save, html)
    over = load_mesh(mesh, topology)
    loaded = load_program(program, microbatches, schedule, chunks, recompute)
    found = _planned(program, loaded, over, rules, memory)
    if save is not None:
        found.save(save)
    if html is not None:
        found.report(html)
    show(found, facts(found), as_json)


def diff(before: PlanFile, after: PlanFile, as_json: AsJSON = False) -> None:
    """Show what the second plan does otherwise than the first; status 1 if there is anything."""
    from meshdsl.plan import load_plan

    _show_difference(load_plan(before).diff(load_plan(after)), as_json)


def check(
    saved: PlanFile,
    program: ProgramName,
    rules: RulesText = None,
    memory: MemoryText = None,
    microbatches: Microbatches = None,
    schedule: ScheduleName = None,
    chunks: Chunks = None,
    recompute: Recompute = None,
    as_json: AsJSON = False,
) -> None:
    """Plan a program again, over the mesh and topology of a saved plan; status 1 and the difference if it changed.

    For CI: the saved plan is the lock file of what a program communicates.
    """
    from meshdsl.plan import load_plan

    before = load_plan(saved)
    loaded = load_program(program, microbatches, schedule, chunks, recompute)
    _show_difference(before.diff(_planned(program, loaded, before.mesh, rules, memory)), as_json)


def explain(
    saved: PlanFile,
    name: Annotated[str, typer.Argument(help="path of an input, as the plan prints it", show_default=False)],
    program: Annotated[str | None, typer.Argument(help="path/to/file.py or module:attribute")] = None,
    rules: RulesText = None,
    memory: MemoryText = None,
    microbatches: Microbatches = None,
    schedule: ScheduleName = None,
    chunks: Chunks = None,
    recompute: Recompute = None,
    as_json: AsJSON = False,
) -> None:
    """Say why an input of a saved plan has its layout; with the program, also what every other layout would cost."""
    from meshdsl.api.explain import explain as explained
    from meshdsl.api.program import parallelize_program
    from meshdsl.plan import load_plan

    before = load_plan(saved)
    if program is None:
        found = explained(before, name)
    else:
        before.layout(name)
        loaded = load_program(program, microbatches, schedule, chunks, recompute)
        with progress.status(f"planning {program} with every layout of {name}"):
            found = parallelize_program(loaded, before.mesh, rules, memory).explain(name, *loaded.args)
    show(found, found.facts, as_json)


def verify(
    program: ProgramName,
    target: Annotated[
        str | None, typer.Option(help="devices that are not there, as tpu-v5e:4x4; else those here")
    ] = None,
    mesh: Annotated[str | None, typer.Option(help="its axes; data=4,model=2, or as the target's devices lie")] = None,
    topology: Annotated[str | None, typer.Option(help="what the mesh costs; cpu, or the target's preset")] = None,
    rules: RulesText = None,
    memory: MemoryText = None,
    microbatches: Microbatches = None,
    schedule: ScheduleName = None,
    chunks: Chunks = None,
    recompute: Recompute = None,
    as_json: AsJSON = False,
) -> None:
    """Compile a program's step and compare its collectives with the planned ones; status 1 if they differ.

    Shows memory and FLOPs of both as well; with --target, also what its compiler made of the collectives.
    """
    import jax

    from meshdsl.api.program import parallelize_program
    from meshdsl.lowering.aot_targets import parse_target

    asked = parse_target(target) if target else None
    over = load_mesh(
        mesh or (asked.mesh if asked else "data=4,model=2"), topology or (asked.preset if asked else "cpu")
    )
    if asked:
        asked.devices(over)
    else:
        jax.config.update("jax_num_cpu_devices", over.size)
    loaded = load_program(program, microbatches, schedule, chunks, recompute)
    with progress.status(f"planning and compiling {program} over {over}"):
        report = parallelize_program(loaded, over, rules, memory).verify(*loaded.args, target=target)
    show(report, verified(report), as_json)


def verified(report: Any) -> dict[str, Any]:
    """What verify found, as plain values."""
    sides = {"planned bytes": "planned", ("lowered" if report.target else "compiled") + " bytes": "compiled"}
    sides |= {"compiled bytes": "made"} if report.target else {}
    lines = [
        {"kind": line.kind, "axes": line.axes, **{name: float(getattr(line, side)) for name, side in sides.items()}}
        for line in report.lines
    ]
    return {"target": report.target, "lines": lines, "held": asdict(report.held), "notes": report.notes}


def facts(found: Any) -> dict[str, Any]:
    """A plan as plain values."""
    return {
        "mesh": str(found.mesh),
        "topology": found.topology.name,
        "seconds": found.seconds,
        "lower_bound": found.lower_bound,
        "simulated_seconds": found.simulated_seconds,
        "gap": found.gap,
        "bytes": found.bytes,
        "memory": found.memory,
        "pipeline": found.pipeline.facts if found.pipeline else None,
        "inputs": {array.path: str(array.layout.named(array.dims)) for array in found.inputs},
        "collectives": [asdict(each) for each in found.collectives],
    }


def _planned(name: str, loaded: "Program", mesh: Any, rules: str | None, memory: str | None) -> Any:
    from meshdsl.api.program import parallelize_program

    with progress.status(f"planning {name} over {mesh}"):
        return parallelize_program(loaded, mesh, rules, memory).plan(*loaded.args)


def _show_difference(found: Any, as_json: bool) -> None:
    show(found, asdict(found), as_json)
    if found:
        raise typer.Exit(1)
