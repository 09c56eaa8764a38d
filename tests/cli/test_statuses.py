"""Exit statuses: 0 done, 1 changed, 2 bad input, 3 infeasible, 4 another program or jax, 130 Ctrl-C, 141 pipe."""

import errno
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import pytest

import meshdsl as md
from meshdsl.cli import main
from meshdsl.cli.statuses import message_of, status_of
from meshdsl.cli.train import _explain

STEP = """
import jax, jax.numpy as jnp
import meshdsl as md

def step(w, batch):
    return w - 0.1 * jax.grad(lambda w: jnp.mean(LOSS))(w)

array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
program = md.Program(step, (array(64, 32), array(128, 64)), layouts={"batch": "data=S(0)", "w": LAYOUT})
"""
FORMS = {
    "whole": ("(batch @ w) ** 2", "B"),
    "split": ("(batch @ w) ** 2", "S(0)"),
    "other": ("jnp.tanh(batch @ w) ** 2", "B"),
}


@pytest.fixture
def ended(tmp_path, monkeypatch, capsys):
    """Runs the command; returns its status, output and error output."""
    for name, (loss, placed) in FORMS.items():
        (tmp_path / f"{name}.py").write_text(STEP.replace("LOSS", loss).replace("LAYOUT", f"'data={placed} model=B'"))
    (tmp_path / "long.py").write_text((tmp_path / "whole.py").read_text().replace("128", "256"))
    (tmp_path / "stopped.py").write_text("raise KeyboardInterrupt")
    monkeypatch.chdir(tmp_path)

    def run(*options):
        monkeypatch.setattr(sys, "argv", ["meshdsl", *options])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code or 0, *capsys.readouterr()

    assert run("plan", "whole.py", "--save", "whole.json")[0] == 0
    return run


def test_a_disk_that_is_full_is_no_fault_of_meshdsl():
    assert status_of(OSError(errno.ENOSPC, "No space left on device")) == 2
    assert message_of(OSError(errno.EROFS, "Read-only file system", "runs/a")) == (
        "[Errno 30] Read-only file system: 'runs/a': make room, or write elsewhere"
    )
    assert status_of(OSError(errno.EBADF, "Bad file descriptor")) == 70


def test_a_plan_that_holds_and_one_that_changed(ended):
    assert ended("check", "whole.json", "whole.py")[0] == 0
    status, out, _ = ended("check", "whole.json", "split.py")
    assert status == 1 and out.startswith("worse: predicted step time +")


def test_another_program(ended):
    status, out, _ = ended("check", "whole.json", "other.py")
    assert status == 4 and out.startswith("different program: the step itself changed; if that is meant,")
    assert "program      step " in out
    ended("plan", "other.py", "--save", "other.json")
    status, out, _ = ended("diff", "whole.json", "other.json", "--json")
    assert status == 4 and json.loads(out)["different"] == "program"


def test_other_inputs_are_another_program_on_any_mesh(ended):
    ended("plan", "long.py", "--mesh", "data=2,model=4", "--save", "long.json")
    status, out, _ = ended("diff", "whole.json", "long.json")
    assert status == 4 and out.startswith("different program: ")


def test_another_mesh_or_pipeline_is_no_other_program(ended):
    ended("plan", "whole.py", "--mesh", "data=2,model=4", "--save", "mesh.json")
    assert ended("diff", "whole.json", "mesh.json")[0] == 1
    ended("plan", "whole.py", "--microbatches", "4", "--save", "parts.json")
    assert ended("diff", "whole.json", "parts.json")[0] == 1


def test_another_jax(ended):
    plan = md.load_plan("whole.json")
    assert plan.jax == jax.__version__
    replace(plan, jax="0.0.1").save("old.json")
    assert ended("check", "old.json", "whole.py")[0] == 0  # which traces the step to the same program
    ended("plan", "other.py", "--save", "other.json")
    replace(md.load_plan("other.json"), jax="0.0.1").save("old.json")
    status, out, _ = ended("check", "old.json", "whole.py")
    assert status == 4 and out.startswith("different jax: another version traces the step differently; plan with")
    assert ["jax", "0.0.1", jax.__version__] in [line.split() for line in out.splitlines()]
    replace(plan, jax="").save("older.json")
    assert '"jax"' not in Path("older.json").read_text() and md.load_plan("older.json") == plan


@pytest.mark.parametrize(
    ("options", "status"),
    [
        (("check", "whole.json", "whole.py", "--memory", "1kB"), 3),
        (("search", "whole.py", "--devices", "2", "--memory", "1kB"), 3),
        (("plan", "none.py"), 2),
        (("plan", "whole.py", "--no-such-option"), 2),
        (("plan", "stopped.py"), 130),
    ],
)
def test_no_plan_bad_input_and_ctrl_c(ended, options, status):
    found, out, err = ended(*options)
    assert found == status and "Traceback" not in out + err and not (out and status == 2)


@pytest.mark.parametrize("options", [("topology", "list"), ("topology", "list", "--json"), ("--help",)])
def test_a_closed_pipe_ends_the_command_quietly(options):
    command = subprocess.Popen(
        [sys.executable, "-m", "meshdsl", *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    command.stdout.close()  # before anything is written
    assert (command.wait(), command.stderr.read()) == (141, "")


def test_what_a_process_of_a_run_says_to_the_others(capsys):
    assert _explain(md.ArgumentError("no mesh")) == ("no mesh", 2)
    assert _explain(KeyboardInterrupt()) == ("interrupted", 130)
    assert _explain(SystemExit(3)) == ("ended by SystemExit(3)", 2)
    assert capsys.readouterr().err == ""
    assert _explain(KeyError("own fault")) == ("KeyError: 'own fault'", 70)
    assert capsys.readouterr().err == "KeyError: 'own fault'\n"  # the traceback is that of this process
