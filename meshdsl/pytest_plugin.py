"""A pytest plugin: the fixture ``golden_plan`` compares a plan, or what ``md.inspect`` has read, with a saved one.

    def test_communication(golden_plan):
        golden_plan("step.json", sharded.plan(*args))
        golden_plan("theirs.json", md.inspect(jitted, *args, topology="dgx-h100"))

compares with ``golden/step.json`` beside the test's file, and fails with the difference. ``pytest --update-golden``
writes the files instead. pytest loads the plugin by its entry point once meshdsl is installed.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from meshdsl.plan.plan import Plan, Recorded


FOLDER = "golden"  # beside the test's file
UPDATE = "--update-golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option ``--update-golden``."""
    group = parser.getgroup("meshdsl")
    group.addoption(UPDATE, action="store_true", help="write the golden plans instead of comparing with them")


@pytest.fixture
def golden_plan(request: pytest.FixtureRequest) -> "Callable[[str, Plan | Recorded], None]":
    """Return ``golden_plan("name.json", plan)``, which fails with the difference if plan and file differ."""

    def compare(name: str, plan: "Plan | Recorded") -> None:
        file = request.path.parent / FOLDER / name
        if request.config.getoption(UPDATE):
            file.parent.mkdir(parents=True, exist_ok=True)
            plan.save(file)
        __tracebackhide__ = True
        if fault := difference(file, plan):
            pytest.fail(fault, pytrace=False)

    return compare


def difference(file: Path, plan: "Plan | Recorded") -> str:
    """Return the difference between a plan and that of a file; empty if they are equal."""
    from meshdsl.plan import load_plan

    if not file.exists():
        return f"no golden plan {file}; pytest {UPDATE} writes it"
    found = load_plan(file).diff(plan)
    return f"the plan differs from {file}; pytest {UPDATE} accepts it:\n{found}" if found else ""
