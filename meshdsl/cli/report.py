"""``meshdsl report``: a saved plan as one HTML page, as a trace, and as a graph."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshdsl.cli.options import AsJSON, LayoutTexts, OptionalProgram, RulesText, SavedPlan
from meshdsl.cli.output import check_writable, show, working
from meshdsl.cli.programs import load_program
from meshdsl.errors import ArgumentError

if TYPE_CHECKING:
    from meshdsl.plan import Plan  # imports jax, which help texts do without


def report(
    saved: SavedPlan,
    program: OptionalProgram = None,
    html: Annotated[Path | None, typer.Option(help="the page; default: beside the plan")] = None,
    against: Annotated[Path | None, typer.Option(help="a second plan to compare with")] = None,
    perfetto: Annotated[
        Path | None, typer.Option(help="also write the timeline as a trace, for ui.perfetto.dev")
    ] = None,
    model_explorer: Annotated[
        Path | None, typer.Option(help="also write the planned program as a graph for Model Explorer")
    ] = None,
    layouts: LayoutTexts = None,
    rules: RulesText = None,
    as_json: AsJSON = False,
) -> None:
    """Write a saved plan as one HTML page that works offline."""
    from meshdsl.plan import load_plan
    from meshdsl.plan.report import report_data, save_perfetto, save_report

    page = html or Path(f"{str(saved).removesuffix('.json')}.html")
    check_writable(page, perfetto, model_explorer)
    with working(f"drawing {saved}"):
        found = load_plan(saved)
        other = [] if against is None else ["--against", str(against)]
        command = shlex.join(["meshdsl", "report", str(saved), *other])
        save_report(found, page, None if against is None else load_plan(against), command)
    if perfetto is not None:
        save_perfetto(found, perfetto)
    if model_explorer is not None:
        _save_graph(found, program, layouts, rules, model_explorer)
    written = [str(file) for file in (page, perfetto, model_explorer) if file is not None]
    show("report", f"written: {', '.join(written)}", {"written": written, **report_data(found)}, as_json)


def _save_graph(found: "Plan", program: str | None, layouts: list[str] | None, rules: str | None, path: Path) -> None:
    """Writes the program's graph under a plan that was made for it."""
    from meshdsl.api.program import parallelize_program
    from meshdsl.plan.report import save_model_explorer

    if program is None:
        raise ArgumentError("--model-explorer also draws the program: name it after the plan, as in p.json train.py")
    loaded = load_program(program, layouts=layouts)
    pipelined = replace(loaded, pipeline=found.pipeline.asked if found.pipeline else None)
    with working(f"drawing {path}"):
        planned = parallelize_program(pipelined, found.mesh, rules, plan=found).stages(*loaded.args).planned
    save_model_explorer(planned.program, planned.plan, path)
