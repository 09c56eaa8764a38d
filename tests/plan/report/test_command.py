"""``meshdsl report``."""

import json
import shlex

from typer.testing import CliRunner

from meshdsl.cli import app
from meshdsl.errors import PlanFileError
from meshdsl.plan.report import report_html


def run(*options):
    return CliRunner().invoke(app, ["report", *map(str, options)])


def test_a_page_beside_the_plan(plan, other, tmp_path):
    plan.save(tmp_path / "p.json")
    other.save(tmp_path / "q.json")
    done = run(tmp_path / "p.json")
    assert done.exit_code == 0 and done.stdout == f"written: {tmp_path}/p.html\n"
    command = shlex.join(["meshdsl", "report", str(tmp_path / "p.json")])
    assert (tmp_path / "p.html").read_text() == report_html(plan, command=command)
    run(tmp_path / "p.json", "--html", tmp_path / "both.html", "--against", tmp_path / "q.json")
    assert (tmp_path / "both.html").read_text() == report_html(
        plan, other, f"{command} {shlex.join(['--against', str(tmp_path / 'q.json')])}"
    )


def test_a_trace_and_json(plan, tmp_path):
    plan.save(tmp_path / "p.json")
    done = run(tmp_path / "p.json", "--perfetto", tmp_path / "t.json", "--json")
    facts = json.loads(done.stdout)
    assert facts["bytes"] == plan.bytes and facts["written"] == [f"{tmp_path}/p.html", f"{tmp_path}/t.json"]
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


def test_a_missing_plan(tmp_path):
    done = run(tmp_path / "p.json")
    assert isinstance(done.exception, PlanFileError) and not (tmp_path / "p.html").exists()
