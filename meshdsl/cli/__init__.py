"""The command ``meshdsl``; also ``python -m meshdsl``.

Wrong input ends with one message on standard error and status 2, before anything is compiled; ``meshdsl --debug ...``
ends with the traceback instead. ``docs/reference/cli.md`` lists all statuses. A command whose output pipe is closed
ends quietly, with the status of a process killed by SIGPIPE.

Modules: ``options`` that several commands take, ``programs`` (loading), ``output``, ``statuses`` (of errors), then one
per group of commands: ``plan`` (plan, frontier, diff, check, explain, verify), ``search``, ``report``, ``inspect``,
``train``, ``topology``.
jax is imported inside the commands, so that help texts and shell completion are quick.
"""

import os
import sys
from typing import Annotated

import typer

import meshdsl
from meshdsl.cli import plan, topology
from meshdsl.cli.inspect import inspect
from meshdsl.cli.report import report
from meshdsl.cli.search import search
from meshdsl.cli.statuses import message_of, status_of
from meshdsl.cli.train import train
from meshdsl.util.exit_status import CLOSED_PIPE
from meshdsl.util.text import visible

app = typer.Typer(no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]})
for command in (
    plan.plan,
    plan.frontier,
    plan.diff,
    plan.check,
    plan.verify,
    plan.explain,
    search,
    report,
    inspect,
    train,
):
    app.command()(command)
app.add_typer(topology.app, name="topology")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(meshdsl.__version__)
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option(help="end with the whole traceback")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="print the version", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Plan training steps over device meshes, and run exactly the plans."""


def main() -> None:
    """Runs the command."""
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except (BrokenPipeError, SystemExit) as end:
        # click raises SystemExit where it meets a BrokenPipeError
        if not any(isinstance(each, BrokenPipeError) for each in (end, end.__context__)):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what Python still writes when it ends
        sys.exit(CLOSED_PIPE)
    except Exception as error:
        message = message_of(error)
        if "--debug" in sys.argv or not message:
            sys.excepthook(type(error), error, error.__traceback__)
        else:
            print("meshdsl:", visible(message, allowed="\n"), file=sys.stderr)
        sys.exit(status_of(error))
