"""The command ``meshdsl``; also ``python -m meshdsl``.

Bad input ends with one message on standard error and status 2, before anything is compiled. Status 1 says that
something does not hold: no plan fits the memory, plans differ, compiled and planned collectives differ.
``meshdsl --debug ...`` ends with the traceback instead.
"""

import sys
from typing import Annotated

import typer

from meshdsl.cli import plan, topology
from meshdsl.cli.common import message_of, status_of
from meshdsl.cli.report import report
from meshdsl.cli.search import search
from meshdsl.cli.train import train
from meshdsl.util.text import visible

app = typer.Typer(no_args_is_help=True)
for command in (plan.plan, plan.diff, plan.check, plan.verify, plan.explain, search, report, train):
    app.command()(command)
app.add_typer(topology.app, name="topology")


@app.callback()
def _options(debug: Annotated[bool, typer.Option(help="end with the whole traceback")] = False) -> None:
    """Plan training steps over device meshes, and run exactly the plans."""


def main() -> None:
    """Run the command."""
    try:
        app()
    except Exception as error:
        said = message_of(error)
        if "--debug" in sys.argv or not said:
            raise
        print("meshdsl:", visible(said, kept="\n"), file=sys.stderr)
        sys.exit(status_of(error))
