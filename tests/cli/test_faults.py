"""What a program's own code raises, and what names nothing: one message with the line and the remedy."""

import sys

import pytest
from typer.testing import CliRunner

from meshdsl.cli import app, main

WRONG = """
import jax, jax.numpy as jnp
import meshdsl as md

def step(w, batch):
    return w + batch

program = md.Program(step, tuple(jax.ShapeDtypeStruct((n,), jnp.float32) for n in (3, 4)))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    sources = {"wrong": WRONG, "raises": "\n1 / 0", "parses": "def f(:", "imports": "import not_there"}
    sources |= {"uncalled": WRONG.replace("))\n", "), layouts=md.fsdp)\n").replace("(3, 4)", "(4, 4)")}
    sources |= {"ends": "import sys; sys.exit('usage')", "takes": "def program(mesh, data=3, *more): ..."}
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ended(monkeypatch, capsys, *options):
    monkeypatch.setattr(sys, "argv", ["meshdsl", *options])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("plan", "wrong.py"), "wrong.py:6: TypeError: add got incompatible shapes for broadcasting: (3,), (4,)."),
        (("plan", "raises.py"), "raises.py:2: ZeroDivisionError: division by zero"),
        (("plan", "parses.py"), "parses.py:1: SyntaxError: invalid syntax"),
        (("plan", "imports.py"), "imports.py:1: ModuleNotFoundError: No module named 'not_there'"),
        (("search", "wrong.py", "--devices", "2"), "wrong.py:6: TypeError: "),
    ],
)
def test_what_the_program_raises_is_told_with_its_line(folder, options, said, monkeypatch, capsys):
    status, err = ended(monkeypatch, capsys, *options)
    assert status == 2 and err.startswith(f"meshdsl: {said}") and "Traceback" not in err
    assert err.endswith("meshdsl --debug ... shows the traceback\n") and "JAX has removed" not in err
    assert ("step was traced with w float32[3], batch float32[4]" in err) == ("wrong.py" in options)


def test_debug_shows_the_traceback(folder, monkeypatch, capsys):
    status, err = ended(monkeypatch, capsys, "--debug", "plan", "raises.py")
    assert status == 2 and "Traceback" in err and "ZeroDivisionError" in err


def test_a_fault_of_meshdsl_keeps_its_traceback(folder, monkeypatch, capsys):
    monkeypatch.setattr("meshdsl.cli.plan.load_mesh", len)
    status, err = ended(monkeypatch, capsys, "plan", "raises.py")
    assert status == 70 and "Traceback" in err and "TypeError" in err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ("plan", "wrong.py:program"),
            "give the file alone, as wrong.py, which defines 'program', or its module, as wrong:program",
        ),
        (("plan", "ends.py"), "ends.py ended the command:\n  sys.exit('usage') while it was read; keep that under if"),
        (("plan", "takes.py"), "program in takes.py needs mesh; it is called without arguments"),
        (("plan", "wong.py"), "there is no file wong.py; did you mean 'wrong.py'?"),
        (
            ("inspect", "plan.json"),
            "is no Python script; what was saved is shown by: meshdsl report plan.json",
        ),
        (
            ("train", "wrong.py", "--folder", "wrong.py/run"),
            "wrong.py/run cannot be the folder of a run: there is a file",
        ),
        (("plan", "wrong.py", "--schedule", "none.csv"), "cannot read the schedule 'none.csv': No such file"),
        (("plan", "wrong.py", "--save", "none/p.json"), "'none/p.json': there is no folder 'none'; make it first"),
        (("plan", "wrong.py", "--html", "."), "cannot write '.': it is a folder"),
        (("search", "wrong.py", "--devices", "2", "--save", "none/p.json"), "there is no folder 'none'"),
        (("search", "wrong.py", "--devices", "2", "--microbatches", "1,x"), "--microbatches: '1,x', not numbers"),
        (("search", "wrong.py", "--devices", "2", "--microbatches", ""), "--microbatches: '', not numbers such as 1,8"),
    ],
)
def test_names_of_nothing(folder, options, said, monkeypatch, capsys):
    status, err = ended(monkeypatch, capsys, *options)
    assert status == 2 and said in err


def test_names_cannot_speak_to_the_terminal(folder, tmp_path, monkeypatch, capsys):
    name = "\x1b[2J\u202e\n" + 10_000 * "x"
    pairs = f"{{{name!r}: jax.ShapeDtypeStruct((3,), jnp.float32), '😀': jax.ShapeDtypeStruct((3, 5), jnp.float32)}}"
    source = WRONG.replace("return w + batch", "return jax.tree.map(lambda w: w + 1, w)").partition("program =")[0]
    (tmp_path / "hostile.py").write_text(f"{source}program = md.Program(step, ({pairs}, jnp.zeros(8)))")
    printed = CliRunner().invoke(app, ["plan", "hostile.py", "--save", "p.json"], catch_exceptions=False).stdout
    assert "w/'\\x1b[2J\\u202e\\nxx" in printed and "w/😀" in printed and not {"\x1b", "\u202e"} & set(printed)
    assert max(map(len, printed.splitlines())) < 300
    status, said = ended(monkeypatch, capsys, "explain", "p.json", "w/\x1b[2J")
    assert status == 2 and "no input 'w/\\x1b[2J'" in said and "\x1b" not in said


def test_a_strategy_that_is_not_called(folder, monkeypatch, capsys):
    status, err = ended(monkeypatch, capsys, "plan", "uncalled.py")
    assert status == 2 and err.endswith("neither a dict of layouts by globs nor 'as-given'; call it: fsdp()\n")


def test_axes_that_are_empty(folder, monkeypatch, capsys):
    (folder / "right.py").write_text(WRONG.replace("(3, 4)", "(4, 4)"))
    status, err = ended(monkeypatch, capsys, "search", "right.py", "--devices", "2", "--axes", "")
    assert status == 2 and "'' is no axis name" in err
