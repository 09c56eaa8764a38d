"""``meshdsl plan``, ``diff``, ``check``, ``explain``, ``verify``, ``topology``."""

import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

import meshdsl as md
from meshdsl.cli import app, main
from meshdsl.cli.programs import load_program
from meshdsl.layouts.machine import keep_topology
from meshdsl.layouts.topology import preset_names

ROOT = Path(__file__).parent.parent.parent
SOURCE = """
import jax, jax.numpy as jnp
import meshdsl as md

def step(w, batch):
    return w - 0.1 * jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(w)

program = md.Program(
    step, (jax.ShapeDtypeStruct((64, 32), jnp.float32), jax.ShapeDtypeStruct((128, 64), jnp.float32)),
    layouts={"batch": "data=S(0)", "w": LAYOUT},
)
"""


STACKED = """
import jax, jax.numpy as jnp
import meshdsl as md

def step(w, batch):
    def loss(w):
        return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, w)[0] ** 2)
    return w - 0.1 * jax.grad(loss)(w)

array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
program = md.Program(step, (array(4, 8, 8), array(16, 8)), layouts={"w": "pipe=S(0)"}, pipeline=OWN)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, layout in {"whole": "data=B model=B", "split": "data=S(0) model=B"}.items():
        (tmp_path / f"{name}.py").write_text(SOURCE.replace("LAYOUT", repr(layout)))
    for name, own in {"stacked": "None", "piped": "md.Pipeline(8, per_microbatch=True)"}.items():
        (tmp_path / f"{name}.py").write_text(STACKED.replace("OWN", own))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*options):
    result = CliRunner().invoke(app, list(options), catch_exceptions=False)
    return result.exit_code, result.stdout


def test_a_plan_is_printed_saved_and_json(folder):
    kept = ("--save", "p.json", "--html", "p.html")
    status, printed = run("plan", "whole.py", "--mesh", "data=64,model=8", "--topology", "dgx-h100", *kept)
    plan = md.load_plan(folder / "p.json")
    assert status == 0 and str(plan) in printed and "topology dgx-h100" in printed
    assert (folder / "p.html").read_text().startswith("<!DOCTYPE html>")
    _, printed = run("plan", "whole.py", "--mesh", "data=64,model=8", "--topology", "dgx-h100", "--json")
    facts = json.loads(printed)
    assert facts["seconds"] == plan.seconds and facts["inputs"]["batch"].startswith("data=S(0)")
    assert [c["kind"] for c in facts["collectives"]] == [c.kind for c in plan.collectives]


def test_plans_are_compared_and_checked(folder):
    for name in ("whole", "split"):
        run("plan", f"{name}.py", "--save", f"{name}.json")
    assert run("diff", "whole.json", "whole.json") == (0, "the plans are equal\n")
    status, printed = run("diff", "whole.json", "split.json")
    assert status == 1 and printed == str(md.load_plan("whole.json").diff(md.load_plan("split.json"))) + "\n"
    assert json.loads(run("diff", "whole.json", "split.json", "--json")[1])["layouts"][0]["name"] == "w"
    assert run("check", "whole.json", "whole.py") == (0, "the plans are equal\n")
    status, printed = run("check", "whole.json", "split.py")
    assert status == 1 and printed.startswith("worse: predicted step time +")
    assert ["w", "float32[64,32]", "B", "data=S(0)"] in [line.split() for line in printed.splitlines()]


def test_a_pipeline_is_asked_for(folder):
    said = ("--mesh", "pipe=2", "--microbatches", "4", "--schedule", "gpipe")
    facts = json.loads(run("plan", "stacked.py", *said, "--save", "p.json", "--json")[1])["pipeline"]
    assert (facts["axis"], facts["microbatches"], facts["schedule"], facts["ticks"]) == ("pipe", 4, "gpipe", 10)
    plan = md.load_plan("p.json")
    assert facts["lockstep"] == pytest.approx(plan.seconds) and facts["asynchronous"] < plan.seconds
    assert run("check", "p.json", "stacked.py", *said[2:]) == (0, "the plans are equal\n")
    status, printed = run("check", "p.json", "stacked.py")
    assert status == 1 and "4 microbatches, gpipe over pipe, bubble 20.0%  none" in printed


def test_what_is_asked_for_stands_in_place_of_the_programs_own(folder):
    asked = load_program("piped.py", schedule="interleaved", chunks=2).pipeline
    assert asked == md.Pipeline(8, "interleaved", 2, per_microbatch=True)
    assert load_program("stacked.py", 4, recompute="none").pipeline == md.Pipeline(4, recompute="none")
    table = md.make_schedule("zb-h1", ranks=2, microbatches=6)
    table.save("table.csv")
    assert load_program("stacked.py", schedule="table.csv").pipeline == md.Pipeline(6, table)
    assert load_program("piped.py").pipeline == md.Pipeline(8, per_microbatch=True)
    md.make_schedule("zb-v", 2, 8).save("table.csv")
    assert load_program("piped.py", schedule="table.csv").pipeline.schedule == md.make_schedule("zb-v", 2, 8)


def test_an_input_is_explained(folder):
    run("plan", "whole.py", "--save", "p.json")
    status, printed = run("explain", "p.json", "w")
    assert status == 0 and printed == "w float32[64,32] has B; data is pinned, model is pinned\n"
    status, printed = run("explain", "p.json", "w", "whole.py", "--json")
    facts = json.loads(printed)
    seconds = {each["layout"]: each["seconds"] for each in facts["alternatives"]}
    assert status == 0 and len(seconds) == 9 and seconds["data=B model=B"] == md.load_plan("p.json").seconds


def test_meshes_are_searched(folder):
    status, printed = run("search", "split.py", "--devices", "4", "--topology", "dgx-h100")
    assert status == 0 and printed.startswith("mesh ")
    asked = printed.splitlines()[-1].removeprefix("the fastest: meshdsl ").split()
    planned = json.loads(run(*asked, "--json")[1])
    assert planned["mesh"] == printed.splitlines()[1].split()[0] and planned["topology"] == "dgx-h100"
    status, printed = run("search", "split.py", "--devices", "2", "--json", "--microbatches", "1,3")
    *whole, parts, last = json.loads(printed)["candidates"]
    assert status == 0 and [each["microbatches"] for each in whole] == [1, 1] and whole[0]["seconds"] > 0
    assert (
        parts["microbatches"] == last["microbatches"] == 3
        and "batch of 128 (batch) does not divide into 3" in parts["fault"]
    )
    assert run("search", "split.py", "--devices", "4", "--memory", "1kB")[0] == 3


def test_compiled_collectives_are_verified(folder):
    status, printed = run("verify", "whole.py")
    assert status == 0 and "compiled bytes" in printed
    facts = json.loads(run("verify", "whole.py", "--mesh", "data=4,model=2", "--json")[1])
    assert all(line["planned_bytes"] == line["compiled_bytes"] for line in facts["lines"]) and facts["lines"]
    assert facts["held"]["flops"] == facts["held"]["compiled_flops"] > 0 < facts["held"]["compiled_memory"]


@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu, which compiles for TPUs, is not installed")
def test_collectives_are_verified_for_a_target(folder):
    status, printed = run("verify", "whole.py", "--target", "tpu-v5e:2x2")
    assert status == 0 and printed.startswith("compiled for tpu-v5e:2x2 by libtpu ")
    assert "lowered bytes" in printed and "compiled bytes" in printed
    facts = json.loads(run("verify", "whole.py", "--target", "tpu-v5e:2x2", "--json")[1])
    assert all(line["planned_bytes"] == line["lowered_bytes"] for line in facts["lines"]) and facts["lines"]
    assert "the program sends for" in printed and all(line["covered"] == 0 for line in facts["overlap"])


def test_topologies_are_listed_shown_and_taken(folder):
    names = json.loads(run("topology", "list", "--json")[1])["topologies"]
    listed = run("topology", "list")[1].splitlines()
    assert [line.split()[0] for line in listed[::2]] == names == list(preset_names())
    assert "16x16 devices at 90 GB/s" in listed[2 * names.index("tpu-v5e")] and "Cloud TPU" in listed[-1]
    text = run("topology", "show", "dgx-h100")[1]
    assert json.loads(run("topology", "show", "dgx-h100", "--json")[1])["name"] == "dgx-h100"
    (folder / "mine.toml").write_text(text.replace('"dgx-h100"', '"mine"'))
    assert "topology mine" in run("plan", "whole.py", "--topology", "mine.toml")[1]
    (folder / "node.toml").write_text(text.replace("devices = 0", "devices = 8"))
    with pytest.raises(md.MeshDSLError, match="a mesh of 16 devices: topology dgx-h100 joins 8; make the mesh smaller"):
        run("plan", "whole.py", "--mesh", "data=4,model=4", "--topology", "node.toml")


def test_a_measured_topology_is_kept_if_asked(folder, monkeypatch):
    measured = replace(md.topology("cpu"), name="measured", source="measured on 8 x cpu")
    monkeypatch.setenv("MESHDSL_TOPOLOGIES", str(folder))

    def measure(mesh, keep):
        if keep:
            keep_topology(measured, "cpu", mesh)
        return measured

    monkeypatch.setattr(importlib.import_module("meshdsl.calibrate"), "calibrate", measure)
    assert run("topology", "calibrate", "--mesh", "data=4,model=2")[0] == 0
    assert "topology cpu" in run("plan", "whole.py", "--mesh", "data=4,model=2")[1]
    assert run("topology", "calibrate", "--mesh", "data=4,model=2", "--keep")[0] == 0
    printed = run("plan", "whole.py", "--mesh", "data=4,model=2")[1]
    assert "topology measured: measured on 8 x cpu, kept on this machine" in printed
    assert "topology cpu" in run("plan", "whole.py", "--mesh", "data=4,model=2", "--topology", "cpu")[1]


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (("plan", "whole.py", "--mesh", "data:4"), 2, "data:4"),
        (("plan", "whole.py", "--mesh", "model=4"), 2, "no axis 'data'"),
        (("plan", "whole.py", "--memory", "1KiB"), 3, "no plan fits memory=1.02 kB per device"),
        (("plan", "whole.py", "--rules", "hidden:model"), 2, "hidden"),
        (("plan", "whole.py", "--topology", "dgx-h100", "--mesh", "data=4,model=6"), 2, "model=6: groups of 6 devices"),
        (
            ("plan", "stacked.py", "--schedule", "gpipe"),
            2,
            "--schedule: the program has no pipeline; give --microbatches too\n",
        ),
        (
            ("train", "stacked.py", "--microbatches", "0"),
            2,
            "microbatches: 0 is an int, not a positive number of microbatches\n",
        ),
        (("verify", "piped.py", "--schedule", "1f1"), 2, "schedule: no schedule '1f1'; did you mean '1f1b'?\n"),
        (("verify", "whole.py", "--target", "tpu-v5:4x4"), 2, "no target 'tpu-v5:4x4'; did you mean 'tpu-v5"),
        (
            ("verify", "whole.py", "--target", "tpu-v5e:4x4", "--mesh", "data=4,model=2"),
            2,
            "mesh data=4,model=2 has 8 devices, and target tpu-v5e:4x4 16",
        ),
        (
            ("plan", "piped.py", "--chunks", "2"),
            2,
            "chunks: '1f1b' has one chunk per stage, not 2; 'interleaved' and 'zb' take",
        ),
        (("diff", "whole.json", "other.json"), 2, "whole.json"),
        (("plan", "whole.py", "--layouts", "w"), 2, "--layouts: 'w' is not GLOB=LAYOUT, such as 'batch/*=data=S(0)'"),
        (("plan", "whole.py", "--layouts", "wb=data=B"), 2, "layouts['wb']: matches no input"),
        (("plan", "whole.py", "--layouts", "w=data=S(x)"), 2, "S(x)"),
        (
            ("search", "whole.py", "--devices", "2", "--schedule", "gpipe,1f1", "--recompute", "stages"),
            2,
            "schedules: no schedule '1f1'; did you mean '1f1b'?\n  recompute: no choice 'stages'; did you mean 'stage'",
        ),
        (("search", "whole.py", "--devices", "2", "--memory", "1GiBB"), 2, "memory='1GiBB' is not a size"),
        (
            ("search", "whole.py", "--devices", "2", "--layouts", "wb=data=B"),
            2,
            "no mesh of 2 devices can be planned:\n  layouts['wb']: matches no input",
        ),
        (("topology", "show", "gpu"), 2, "no topology 'gpu'; did you mean 'cpu'?"),
    ],
)
def test_bad_input(folder, options, status, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["meshdsl", *options])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == status
    said = capsys.readouterr().err
    assert said.startswith("meshdsl: ") and message in said


def test_debug_shows_where_an_error_comes_from(folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["meshdsl", "--debug", "topology", "show", "gpu"])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "Traceback" in said and "did you mean 'cpu'" in said


def test_a_shell_completes_topologies():
    typed = {"_MESHDSL_COMPLETE": "complete_bash", "COMP_WORDS": "meshdsl plan x.py --topology dgx", "COMP_CWORD": "4"}
    code = "import sys; sys.argv = ['meshdsl']; from meshdsl.cli import main; main()"
    command = [sys.executable, "-c", code]
    said = subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, **typed}, capture_output=True, text=True)
    assert said.stdout.split() == [name for name in preset_names() if name.startswith("dgx")]


def test_help_does_not_load_jax():
    code = "import sys, meshdsl.cli; assert 'jax' not in sys.modules, 'jax'"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_a_shell_completes_schedules_and_paths_of_a_plan(folder):
    run("plan", "whole.py", "--save", "p.json")
    code = "import sys; sys.argv = ['meshdsl']; from meshdsl.cli import main; main()"
    for words, count, names in (("plan x.py --schedule g", 4, ["gpipe"]), ("explain p.json b", 3, ["batch"])):
        typed = {"_MESHDSL_COMPLETE": "complete_bash", "COMP_WORDS": f"meshdsl {words}", "COMP_CWORD": str(count)}
        environment = {**os.environ, **typed, "PYTHONPATH": str(ROOT)}
        said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert said.stdout.split() == names


@pytest.mark.parametrize("command", ["", "plan", "topology", "topology show"])
def test_short_help(command):
    status, printed = run(*command.split(), "-h")
    assert status == 0 and "Usage:" in printed


def test_layouts_on_the_command_line_win_over_the_programs(folder):
    pins = ("--layouts", "w=data=S(0) model=S(1)", "--layouts", "b*=model=B")
    _, printed = run("plan", "whole.py", *pins, "--save", "p.json")
    plan = md.load_plan("p.json")
    assert str(plan.layout("w")) == "data=S(0) model=S(1)" and plan.input("batch").pinned == ("data", "model")
    assert run("check", "p.json", "whole.py", *pins)[0] == 0 and run("check", "p.json", "whole.py")[0] == 1
    _, printed = run("search", "whole.py", "--devices", "2", *pins)
    assert "--layouts 'w=data=S(0) model=S(1)'" in printed
    run("plan", "whole.py", "--layouts", "w=data=S(0)", "--layouts", "w=model=S(1)", "--save", "q.json")
    assert str(md.load_plan("q.json").layout("w")) == "data=S(0) model=S(1)"


def test_the_version_is_printed():
    assert run("--version") == (0, f"{md.__version__}\n")


def test_plan_recomputes_within_the_memory(folder):
    (folder / "deep.py").write_text(
        STACKED.replace("OWN", "None").replace('{"w": "pipe=S(0)"}', '{"batch": "data=S(0)"}')
    )
    options = "deep.py", "--mesh", "data=8", "--json"
    free = json.loads(run("plan", *options)[1])
    limit = int(0.9 * free["memory"])
    options = *options, "--memory", str(limit), "--remat", "auto"
    found = json.loads(run("plan", *options)[1])
    assert free["computed_again"] == free["waterfall"] == []
    assert found["memory"] <= limit and found["computed_again"]
    assert found["waterfall"][0]["bytes"] == free["memory"] and found["waterfall"][-1]["bytes"] == found["memory"]
    assert json.loads(run("verify", *options)[1])["held"]["memory"] == found["memory"]


@pytest.mark.parametrize("command", ["plan", "frontier", "check", "explain", "verify", "search", "train"])
def test_what_the_planner_chooses_is_an_option_of_every_command_that_plans(command):
    _, printed = run(command, "--help")
    assert all(f"--{option} " in printed for option in ("remat", "host", "low-bits", "overlap"))


SCRIPT = """
import jax, jax.numpy as jnp

mesh = jax.make_mesh((8,), ("data",))
rows = jax.NamedSharding(mesh, jax.P("data"))
x = jax.device_put(jnp.ones((64, WIDTH)), rows)
total = jax.jit(lambda x: x.sum(0), out_shardings=jax.NamedSharding(mesh, jax.P()))
total(x)
jax.jit(jnp.tanh, out_shardings=rows)(x)
"""


def test_what_a_script_sends_is_saved_and_compared(folder):
    for width in (8, 16):
        Path(f"s{width}.py").write_text(SCRIPT.replace("WIDTH", str(width)))
        options = ("--step", "<lambda>", "--no-compare", "--topology", "dgx-h100", "--save", f"s{width}.json")
        assert run("inspect", f"s{width}.py", *options, "--html", "s.html")[0] == 0
    assert md.load_plan("s8.json").bytes == 56 and "compiled by XLA" in Path("s.html").read_text()
    status, printed = run("diff", "s8.json", "s16.json")
    assert status == 4 and "sent per device and step 56 B 112 B +100%" in " ".join(printed.split())
    assert run("diff", "s8.json", "s8.json") == (0, "the plans are equal\n")
    assert run("report", "s8.json", "--against", "s16.json")[0] == 0 and Path("s8.html").exists()
    with pytest.raises(md.MeshDSLError, match=r"--save and --html are of one step, and s8\.py has 2: give --step"):
        run("inspect", "s8.py", "--no-compare", "--save", "s.json")
