"""``meshdsl report``: a saved plan as one HTML page, and as a trace."""

from pathlib import Path
from typing import Annotated

import typer

from meshdsl.cli.options import AsJSON, show
from meshdsl.cli.plan import PlanFile


def report(
    saved: PlanFile,
    html: Annotated[Path | None, typer.Option(help="the page; else beside the plan")] = None,
    against: Annotated[Path | None, typer.Option(help="a second plan to compare with")] = None,
    perfetto: Annotated[
        Path | None, typer.Option(help="also write the timeline as a trace, for ui.perfetto.dev")
    ] = None,
    as_json: AsJSON = False,
) -> None:
    """Write a saved plan as one HTML page that needs nothing but a browser."""
    from meshdsl.plan import load_plan
    from meshdsl.report import report_data, save_perfetto

    found = load_plan(saved)
    page = html or Path(f"{str(saved).removesuffix('.json')}.html")
    found.report(page, None if against is None else load_plan(against))
    if perfetto is not None:
        save_perfetto(found, perfetto)
    written = [str(file) for file in (page, perfetto) if file is not None]
    show(f"written: {', '.join(written)}", {"written": written, **report_data(found)}, as_json)
