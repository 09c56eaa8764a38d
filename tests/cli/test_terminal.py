"""What a terminal shows: tables and text of its width, kinds of collectives in colour; pipes get plain text."""

import logging
import os
import re
import subprocess
import sys
from fractions import Fraction
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from rich.status import Status

from meshdsl.cli import output
from meshdsl.lowering.verify import DeviceUsage, VerifyLine, VerifyReport
from meshdsl.plan.text import summary_text
from meshdsl.util.terminal import Work, print_fitted, terminal
from meshdsl.util.text import table, terminal_width
from tests.programs import small_plan

ROOT = Path(__file__).parent.parent.parent
STEP = """
import jax, jax.numpy as jnp
import meshdsl as md

array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
program = md.Program(lambda w, x: w - (x.T @ (x @ w)), (array(8, 4), array(16, 8)), layouts={"x": "data=S(0)"})
"""
SENT = [("reduce-scatter", 1_234_567_890, 1_234_567_890, 0, 12), ("all-gather", 458_752, 1, 0, 458_752)]
COLORS = re.compile(r"\x1b\[[0-9;]*m")


def shown(monkeypatch, width, is_terminal=True):
    screen = terminal(file=StringIO(), width=width, force_terminal=is_terminal)
    monkeypatch.setattr(output, "out", screen)
    output.show("plan", small_plan(), {}, as_json=False)
    return screen.file.getvalue()


@pytest.mark.parametrize("width", [60, 80, 100, 140, 200])
def test_lines_are_as_wide_as_the_terminal_and_lose_nothing(monkeypatch, width):
    text = COLORS.sub("", shown(monkeypatch, width))
    assert max(map(len, text.splitlines())) <= width
    assert text.split() == str(small_plan()).split()


def fitted(text, width):
    screen = terminal(file=StringIO(), width=width, force_terminal=True)
    print_fitted(screen, text)
    return COLORS.sub("", screen.file.getvalue())


@pytest.mark.parametrize("width", [60, 80, 100, 140, 200])
def test_verification_and_the_summary_of_a_training_run_fit(width):
    lines = [VerifyLine(kind, "data,model", *map(Fraction, sizes)) for kind, *sizes in SENT]
    report = VerifyReport(tuple(lines), ("a note",), DeviceUsage(10, 2e9, 11, 3 * 10**9), "tpu-v5e:4x4")
    for text in (lambda: str(report), lambda: summary_text(small_plan())):
        shown = fitted(text, width)
        assert max(map(len, shown.splitlines())) <= width
        assert shown.split() == text().split()


def test_kinds_have_a_colour_each_on_a_terminal_only(monkeypatch):
    found = re.findall(r"(\x1b\[[0-9;]+m)(all-gather|all-reduce)\x1b\[0m", shown(monkeypatch, 120))
    assert len({kind for _, kind in found}) == len(set(found)) == len({color for color, _ in found}) == 2
    assert shown(monkeypatch, 60, is_terminal=False) == f"{small_plan()}\n"


@pytest.mark.sweep
def test_a_plan_says_that_it_compiles_loops(monkeypatch, tmp_path):
    """A first plan, with an empty cache, on a terminal, and a second one."""
    (tmp_path / "step.py").write_text(f"import logging\nlogging.basicConfig()\n{STEP}")
    environment = {
        "NUMBA_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": str(ROOT),
        "FORCE_COLOR": "1",
        "COLUMNS": "200",
    }
    command = [sys.executable, "-m", "meshdsl", "plan", "step.py", "--mesh", "data=2"]
    said = [
        subprocess.run(command, cwd=tmp_path, env={**os.environ, **environment}, capture_output=True, check=True).stderr
        for _ in range(2)
    ]
    notice = b"the first plan on this machine compiles the planner's loops"
    assert notice in said[0] and notice not in said[1] and b"INFO" not in said[0]


def test_the_line_of_work_says_how_far_the_planner_is(monkeypatch):
    said, logger = [], logging.getLogger("meshdsl.progress")
    monkeypatch.setattr(Status, "update", lambda _, text: said.append(text))
    before = logger.level, logger.propagate, list(logger.handlers)
    with Work(Console(file=StringIO()), "planning") as work:
        logger.debug("plan %s, bound %s", "2 ms", "1 ms")
        work.update("planning again")
    logger.debug("plan %s, bound %s", "2 ms", "2 ms")
    assert said == ["planning (plan 2 ms, bound 1 ms)", "planning again"]
    assert (logger.level, logger.propagate, logger.handlers) == before


def test_columns_without_room_go_below_their_row():
    rows = [("kind", "bytes", "reason"), ("all-gather", "12 B", "needed by dot_general of the first layer")]
    with terminal_width(24):
        assert list(table(rows)) == [
            "kind        bytes",
            "    reason",
            "all-gather  12 B",
            "    needed by",
            "    dot_general of the",
            "    first layer",
        ]
    assert list(table(rows))[1] == "all-gather  12 B   needed by dot_general of the first layer"
