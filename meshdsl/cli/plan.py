"""What a program communicates, before it runs: ``meshdsl plan``, ``frontier``, ``diff``, ``check``, ``explain`` and
``verify``.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshdsl.cli.options import (
    DEFAULT_MESH,
    AsJSON,
    Chunks,
    EffortWord,
    HostWord,
    LayoutTexts,
    LowBitsText,
    MemoryText,
    MeshText,
    Microbatches,
    OptionalProgram,
    OverlapWord,
    ProgramName,
    Recompute,
    RematWord,
    RulesText,
    SavedPlan,
    SavePlan,
    ScheduleName,
    TopologyName,
)
from meshdsl.cli.output import check_writable, show, working
from meshdsl.cli.programs import load_mesh, load_program
from meshdsl.layouts.mesh import Mesh
from meshdsl.util.exit_status import CHANGED, DIFFERENT_PROGRAM

if TYPE_CHECKING:  # these import jax, which help texts do without
    from meshdsl.api import Program
    from meshdsl.plan import Plan, PlanDiff


def plan(
    program: ProgramName,
    mesh: MeshText = DEFAULT_MESH,
    topology: TopologyName = None,
    layouts: LayoutTexts = None,
    rules: RulesText = None,
    memory: MemoryText = None,
    microbatches: Microbatches = None,
    schedule: ScheduleName = None,
    chunks: Chunks = None,
    recompute: Recompute = None,
    remat: RematWord = None,
    host: HostWord = None,
    low_bits: LowBitsText = None,
    overlap: OverlapWord = None,
    effort: EffortWord = "default",
    save: SavePlan = None,
    html: Annotated[Path | None, typer.Option(help="write the plan as an HTML page to this file")] = None,
    as_json: AsJSON = False,
) -> None:
    """Plan a program's step and print the plan: layouts, collectives with their reasons, seconds, memory, gap."""
    check_writable(save, html)
    over = load_mesh(mesh, topology)
    loaded = load_program(program, microbatches, schedule, chunks, recompute, layouts, remat, host, low_bits, overlap)
    found = _plan(program, loaded, over, rules, memory, effort)
    if save is not None:
        found.save(save)
    if html is not None:
        found.report(html)
    show("plan", found, plan_facts(found), as_json)


def frontier(
    program: ProgramName,
    mesh: MeshText = DEFAULT_MESH,
    topology: TopologyName = None,
    layouts: LayoutTexts = None,
    rules: RulesText = None,
    microbatches: Microbatches = None,
    schedule: ScheduleName = None,
    chunks: Chunks = None,
    recompute: Recompute = None,
    remat: RematWord = None,
    host: HostWord = None,
    low_bits: LowBitsText = None,
    overlap: OverlapWord = None,
    effort: EffortWord = "default",
    points: Annotated[int, typer.Option(min=2, help="how many memory limits, up to none")] = 8,
    html: Annotated[Path | None, typer.Option(help="write table and picture as an HTML page to this file")] = None,
    as_json: AsJSON = False,
) -> None:
    """Plan a program's step within several memory limits, from the least possible to none: step time against memory."""
    from meshdsl.api.program import parallelize_program

    check_writable(html)
    over = load_mesh(mesh, topology)
    loaded = load_program(program, microbatches, schedule, chunks, recompute, layouts, remat, host, low_bits, overlap)
    with working(f"planning {program} over {over} within {points} memory limits"):
        found = parallelize_program(loaded, over, rules, effort=effort).frontier(*loaded.args, points=points)
    if html is not None:
        html.write_text(found.page())
    show("frontier", found, found.facts, as_json)


def diff(before: SavedPlan, after: SavedPlan, as_json: AsJSON = False) -> None:
    """Show how the second plan differs from the first; status 1 if it does, 4 if it is of another program."""
    from meshdsl.plan import load_plan

    _show_difference("diff", load_plan(before).diff(load_plan(after)), as_json)


def check(
    saved: SavedPlan,
    program: ProgramName,
    layouts: LayoutTexts = None,
    rules: RulesText = None,
    memory: MemoryText = None,
    microbatches: Microbatches = None,
    schedule: ScheduleName = None,
    chunks: Chunks = None,
    recompute: Recompute = None,
    remat: RematWord = None,
    host: HostWord = None,
    low_bits: LowBitsText = None,
    overlap: OverlapWord = None,
    as_json: AsJSON = False,
) -> None:
    """Plan a program again, over the mesh and topology of a saved plan, and show what changed.

    For CI: the saved plan is the lock file of a program's communication. Status 1 if the plan changed, 4 if the program
    or jax did, 3 if no plan fits any more.
    """
    from meshdsl.plan import load_plan

    before = load_plan(saved)
    loaded = load_program(program, microbatches, schedule, chunks, recompute, layouts, remat, host, low_bits, overlap)
    _show_difference("check", before.diff(_plan(program, loaded, before.mesh, rules, memory, before.effort)), as_json)


def paths_of_inputs(context: typer.Context) -> list[str]:
    """Paths of the inputs of the saved plan on the command line, for completion; none if it cannot be read."""
    try:
        return [array["path"] for array in json.loads(Path(context.params["saved"]).read_bytes())["inputs"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def explain(
    saved: SavedPlan,
    name: Annotated[
        str,
        typer.Argument(
            help="path of an input, as the plan prints it", show_default=False, autocompletion=paths_of_inputs
        ),
    ],
    program: OptionalProgram = None,
    layouts: LayoutTexts = None,
    rules: RulesText = None,
    memory: MemoryText = None,
    microbatches: Microbatches = None,
    schedule: ScheduleName = None,
    chunks: Chunks = None,
    recompute: Recompute = None,
    remat: RematWord = None,
    host: HostWord = None,
    low_bits: LowBitsText = None,
    overlap: OverlapWord = None,
    as_json: AsJSON = False,
) -> None:
    """Explain why an input of a saved plan has its layout; given the program, also the cost of every other layout."""
    from meshdsl.api.explain import explain as explain_input
    from meshdsl.api.program import parallelize_program
    from meshdsl.plan import load_plan

    before = load_plan(saved)
    if program is None:
        found = explain_input(before, name)
    else:
        before.layout(name)
        loaded = load_program(
            program, microbatches, schedule, chunks, recompute, layouts, remat, host, low_bits, overlap
        )
        with working(f"planning {program} with every layout of {name}"):
            sharded = parallelize_program(loaded, before.mesh, rules, memory, effort=before.effort)
            found = sharded.explain(name, *loaded.args)
    show("explain", found, found.facts, as_json)


def verify(
    program: ProgramName,
    target: Annotated[
        str | None, typer.Option(help="compile for absent devices, such as tpu-v5e:4x4; default: the local ones")
    ] = None,
    mesh: Annotated[
        str | None, typer.Option(help="mesh axes; default: data=4,model=2, or the shape of the target")
    ] = None,
    topology: Annotated[
        str | None, typer.Option(help="preset or TOML file; default: that of the target, or of the devices at hand")
    ] = None,
    layouts: LayoutTexts = None,
    rules: RulesText = None,
    memory: MemoryText = None,
    microbatches: Microbatches = None,
    schedule: ScheduleName = None,
    chunks: Chunks = None,
    recompute: Recompute = None,
    remat: RematWord = None,
    host: HostWord = None,
    low_bits: LowBitsText = None,
    overlap: OverlapWord = None,
    exposed: Annotated[
        str | None,
        typer.Option(
            help="less communication beside products than the plan hides is an error, warn or ignore; default: ignore, "
            "or error where the program asks for overlap"
        ),
    ] = None,
    sums: Annotated[
        float | None,
        typer.Option(help="elements that may be computed to check the results; 0: check none; default: 1e7, a second"),
    ] = None,
    as_json: AsJSON = False,
) -> None:
    """Compile a program's step and compare its collectives with the planned ones; status 1 if they differ.

    Small steps are also run on simulated devices beside the unsharded step: status 1 if a result is another one. Also
    shows memory and FLOPs of both; with --target, also the collectives of that target's compiler, and what runs beside
    each.
    """
    import jax

    from meshdsl.api.program import parallelize_program
    from meshdsl.api.sums import SUMS_LIMIT
    from meshdsl.lowering.aot_targets import parse_target

    absent = parse_target(target) if target else None
    shape = mesh or (absent.mesh if absent else DEFAULT_MESH)
    over = load_mesh(shape, topology or (absent.preset if absent else None))
    if absent:
        absent.devices(over)
    else:
        jax.config.update("jax_num_cpu_devices", over.size)
    loaded = load_program(program, microbatches, schedule, chunks, recompute, layouts, remat, host, low_bits, overlap)
    with working(f"planning and compiling {program} over {over}"):
        sharded, limit = parallelize_program(loaded, over, rules, memory), SUMS_LIMIT if sums is None else sums
        report = sharded.verify(*loaded.args, target=target, exposed=exposed, sums=limit)
    show("verify", report, verify_facts(report), as_json)


def verify_facts(report: Any) -> dict[str, Any]:
    """The result of verify as plain values."""
    judged = "lowered" if report.target else "compiled"
    sides = {"planned_bytes": "planned", f"{judged}_bytes": "compiled"}
    sides |= {"compiled_bytes": "made"} if report.target else {}
    lines = [
        {
            "kind": line.kind,
            "axes": line.axes,
            "planned": line.runs,
            judged: line.compiled_runs,
            **{name: float(getattr(line, side)) for name, side in sides.items()},
        }
        for line in report.lines
    ]
    overlap = [asdict(line) for line in report.overlap.lines] if report.overlap else []
    held = asdict(report.held)
    sums = report.sums.facts if report.sums else {"not_checked": report.unchecked}
    return {
        "target": report.target,
        "lines": lines,
        "held": held,
        "overlap": overlap,
        "sums": sums,
        "notes": report.notes,
    }


def plan_facts(found: "Plan") -> dict[str, Any]:
    """A plan as plain values."""
    used = found.utilization._asdict()
    return {
        "name": found.name,
        "fingerprint": found.fingerprint,
        "jax": found.jax,
        "mesh": str(found.mesh),
        "topology": found.topology.name,
        "seconds": found.seconds,
        "lower_bound": found.lower_bound,
        "simulated_seconds": found.simulated_seconds,
        "gap": found.gap,
        "effort": found.effort,
        "bytes": found.bytes,
        "memory": found.memory,
        "host_memory": found.host_memory,
        "on_host": [array._asdict() for array in (*found.host.arrays, *found.host.residuals)] if found.host else [],
        "mfu": found.mfu,
        "utilization": {**used, "divided": dict(used["divided"]), "losses": dict(used["losses"])},
        "pipeline": found.pipeline.facts if found.pipeline else None,
        "computed_again": [value._asdict() for value in found.recomputation.values] if found.recomputation else [],
        "waterfall": [step._asdict() for step in found.waterfall],
        "inputs": {array.path: str(array.layout.named(array.dims)) for array in found.inputs},
        "outputs": {array.path: str(array.layout.named(array.dims)) for array in found.outputs},
        "collectives": [asdict(c) for c in found.collectives],
        "notes": found.notes,
    }


def diff_facts(found: "PlanDiff") -> dict[str, Any]:
    """The difference of two plans as plain values."""
    sides = ("name", "before", "after")
    facts: dict[str, Any] = {"equal": not found, "different": found.different or None, "changes": found.changes}
    for part in ("made_for", "layouts", "totals"):
        facts[part] = [dict(zip(sides, row, strict=True)) for row in getattr(found, part)]
    facts["collectives"] = [
        {"name": name, "before": asdict(before), "after": asdict(after)} for name, before, after in found.collectives
    ]
    return facts


def _plan(name: str, loaded: "Program", mesh: Mesh, rules: str | None, memory: str | None, effort: str) -> "Plan":
    from meshdsl.api.program import parallelize_program

    with working(f"planning {name} over {mesh}"):
        return parallelize_program(loaded, mesh, rules, memory, effort=effort).plan(*loaded.args)


def _show_difference(command: str, found: "PlanDiff", as_json: bool) -> None:
    show(command, found, diff_facts(found), as_json)
    if found:
        raise typer.Exit(DIFFERENT_PROGRAM if found.different else CHANGED)
