"""The command ``meshdsl``; also ``python -m meshdsl``.

Bad input ends with one message on standard error and status 2, before anything is compiled.
"""

import sys

import typer

from meshdsl.cli.train import train
from meshdsl.errors import MeshDSLError

app = typer.Typer(no_args_is_help=True, help="Plan training steps over device meshes, and run exactly the plans.")
app.command()(train)


@app.callback()
def _several() -> None:
    """Plan training steps over device meshes, and run exactly the plans."""


def main() -> None:
    """Run the command."""
    try:
        app()
    except MeshDSLError as error:
        print(f"meshdsl: {error}", file=sys.stderr)
        sys.exit(2)
