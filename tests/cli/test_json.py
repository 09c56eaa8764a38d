"""What ``--json`` prints: one JSON object with its format and version, whatever else writes to standard output."""

import ctypes
import json
import re
import sys
from pathlib import Path

import pytest

from meshdsl.cli import main
from meshdsl.cli.output import JSON_VERSION, show
from meshdsl.planner.memory import combine

PAGE = Path(__file__).parent.parent.parent / "docs" / "reference" / "plan_file.md"
LOUD = """
import ctypes, jax, jax.numpy as jnp
import meshdsl as md

print("banner of Python while the file is read")
ctypes.CDLL(None).puts(b"banner of C while the file is read")

def step(params, x):
    print("banner of Python while the step is traced")
    ctypes.CDLL(None).puts(b"banner of C while the step is traced")
    def loss(params):
        for w in params:
            x_ = jnp.tanh(x @ w)
        return jnp.mean(x_ ** 2)
    return jax.tree.map(lambda w, g: w - g, params, jax.grad(loss)(params))

array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
program = md.Program(step, ([array(64, 64)], array(512, 64)), layouts={"x": "data=S(0)"})
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "loud.py").write_text(LOUD)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def printed(monkeypatch, capfd, *options):
    """Standard output and error of the command, of Python and of C."""
    monkeypatch.setattr(sys, "argv", ["meshdsl", *options])
    with pytest.raises(SystemExit):
        main()
    ctypes.CDLL(None).fflush(None)
    return capfd.readouterr()


def documented(command):
    """The fields that the page lists for a command."""
    (section,) = re.findall(rf"^### [^\n]*`{command}`.*?(?=^###|\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return re.findall(r"`(\w+)`", " ".join(re.findall(r"^\|([^|]*)\|", section, re.MULTILINE)))


@pytest.mark.parametrize(
    "options",
    [
        ("plan", "loud.py"),
        ("frontier", "loud.py", "--points", "2"),
        ("check", "p.json", "loud.py"),
        ("diff", "p.json", "p.json"),
        ("explain", "p.json", "x"),
        ("verify", "loud.py"),
        ("search", "loud.py", "--devices", "2"),
        ("report", "p.json"),
        ("report", "p.json", "loud.py", "--model-explorer", "graph.json"),
        ("topology", "list"),
        ("topology", "show", "cpu"),
    ],
)
def test_standard_output_is_one_json_object(folder, options, monkeypatch, capfd):
    if "p.json" in options:
        printed(monkeypatch, capfd, "plan", "loud.py", "--save", "p.json")
    said = printed(monkeypatch, capfd, *options, "--json")
    facts = json.loads(said.out)
    listed = ("plan", "frontier", "check", "diff", "explain", "verify", "search")
    command = " ".join(options[:2] if options[0] == "topology" else options[:1])
    assert list(facts)[:2] == ["format", "version"]
    assert (facts["format"], facts["version"]) == (f"meshdsl {command} --json", JSON_VERSION)
    assert command not in listed or set(facts) == {"format", "version", *documented(command)}
    if "loud.py" in options:
        assert "banner of C while the file is read" in said.err and "banner of Python while the step" in said.err


def test_text_is_as_pure(folder, monkeypatch, capfd):
    assert printed(monkeypatch, capfd, "plan", "loud.py").out.startswith("plan of step on mesh data=4,model=2")


def test_the_banner_of_a_solver_where_the_memory_limit_binds(folder, monkeypatch, capfd):
    calls = []

    def knapsack(*items):
        calls.append(items)
        ctypes.CDLL(None).puts(b"Running a solver")
        return quiet(*items)

    quiet = combine.knapsack
    monkeypatch.setattr(combine, "knapsack", knapsack)
    free = json.loads(printed(monkeypatch, capfd, "plan", "loud.py", "--mesh", "data=4", "--json").out)
    limit = free["memory"] - 1
    said = printed(monkeypatch, capfd, "plan", "loud.py", "--mesh", "data=4", "--memory", f"{limit}B", "--json")
    assert json.loads(said.out)["memory"] <= limit and calls and "Running a solver" in said.err


def test_numbers_that_json_lacks_are_null(capsys):
    show("plan", "", {"rows": [float("inf"), float("nan"), 1.5]}, as_json=True)
    assert json.loads(capsys.readouterr().out)["rows"] == [None, None, 1.5]
