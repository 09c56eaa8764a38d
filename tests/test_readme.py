"""The README's code runs, and prints the plan that stands below it."""

import contextlib
import io
import re
from pathlib import Path

import numpy as np

import meshdsl as md

README = (Path(__file__).parent.parent / "README.md").read_text()


def run(section):
    """The names that the first program of a section defines."""
    names = {}
    exec(re.search(rf"## {section}.*?```python\n(.*?)```", README, re.DOTALL).group(1), names)
    return names


def test_the_rule_holds():
    names = run("Rules of your own")
    q, k, v = (np.random.default_rng(0).normal(size=(6, 6, 2, n)).astype(np.float32) for n in (3, 3, 4))
    assert len(names["attention"].check(q, k, v)) == 4
    sharded = md.parallelize(
        lambda q, k, v: names["attention"](q, k, v), "data=2,model=2", {"q": "data=S(1) model=S(2)"}
    )
    np.testing.assert_allclose(sharded(q, k, v), names["attention"](q, k, v), rtol=1e-5, atol=1e-6)


def test_the_gradient_of_a_grouped_convolution_is_right():
    names = run("Where `jax.jit` alone is wrong")
    right = np.asarray(names["right"])
    np.testing.assert_allclose(names["planned"], right, rtol=0, atol=1e-6 * np.abs(right).max())
    assert names["plain"].shape == right.shape  # what it holds is the partitioner's affair


def test_steps_on_nnx_objects(capsys):
    names = run("Flax NNX")
    assert "model/layers/0/kernel" in capsys.readouterr().out
    assert names["opt"].step[...] == names["metrics"].count[...] == 3
    assert "model" in names["model"].layers[0].kernel[...].sharding.spec[1]


def test_a_model_cut_by_hand_is_a_pipeline(capsys):
    run("Pipelines")
    assert "1f1b over pipe: 4 microbatches through 3 stages in 8 ticks" in capsys.readouterr().out


def test_sums_in_fewer_bits_send_what_is_printed():
    code, printed = re.search(
        r"## Sums in fewer bits.*?```python\n(.*?)```\n\n```text\n(.*?)```", README, re.DOTALL
    ).groups()
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "readme.py", "exec"), {"__name__": "readme"})
    assert out.getvalue() == printed
    with contextlib.redirect_stdout(out):
        exec(re.sub(r".*without this line.*\n", "", code), {"__name__": "readme"})
    assert out.getvalue().endswith("5.51 MB\n") and "without this line, 5.51 MB" in code


def test_named_dims_are_pinned_by_rules(capsys):
    names = run("Named dims")
    assert "model=S(hidden)" in capsys.readouterr().out
    args = names["params"], names["optimizer"].init(names["params"]), names["batch"]
    assert str(names["fsdp"].plan(*args).layout("params/up").on("data")) == "S(0)"


def test_the_first_screen_is_ten_lines_and_their_plan(tmp_path):
    code, printed = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", README, re.DOTALL).groups()
    assert len(code.strip().splitlines()) == 10
    file = tmp_path / "readme.py"
    file.write_text(code)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, str(file), "exec"), {"__name__": "readme"})
    assert out.getvalue().strip() == printed.strip()
