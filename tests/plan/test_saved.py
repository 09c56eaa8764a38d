"""Files and copies of plans keep all of them; other files are refused."""

import pickle
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest

from meshdsl.errors import PlanFileError
from meshdsl.layouts import Layout
from meshdsl.layouts.reshard import complete, reshard
from meshdsl.pins import make_pins
from meshdsl.plan import build_plan, load_plan
from tests.programs import MESH, small_plan, small_program, small_solution


def test_files_keep_everything(tmp_path):
    plan = small_plan()
    plan.save(tmp_path / "a.json")
    again = load_plan(tmp_path / "a.json")
    assert again == plan
    assert again.solution == plan.solution
    again.save(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    file = tmp_path / "p.json"
    small_plan().save(file)
    before = file.read_bytes()

    def full(path, data):
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(PlanFileError) as caught:
        replace(small_plan(), name="other").save(file)
    assert str(caught.value) == f"cannot write the plan file '{file}': No space left on device"
    assert (file.read_bytes(), list(tmp_path.iterdir())) == (before, [file])


def test_plans_can_be_pickled_and_copied():
    plan = small_plan()
    assert pickle.loads(pickle.dumps(plan)) == deepcopy(plan) == plan
    swapped = replace(plan.inputs[0], layout=Layout.parse("model=S(0) data=S(0)"))
    assert str(pickle.loads(pickle.dumps(swapped)).layout) == "model=S(0) data=S(0)"


def test_files_keep_the_order_of_axes(tmp_path):
    program, solution = small_program(), small_solution()
    swapped, whole = complete(Layout.parse("model=S(1) data=S(1)"), MESH), complete(Layout(), MESH)
    trees = {
        **solution.trees,
        0: reshard(swapped, whole, (8, 16), 4, MESH),
        4: reshard(whole, swapped, (8, 16), 4, MESH),
    }
    layouts, uses = {**solution.layouts, 0: swapped}, {**solution.uses, (3, 0): swapped}
    plan = build_plan(program, replace(solution, layouts=layouts, uses=uses, trees=trees), make_pins(program, MESH))
    plan.save(tmp_path / "p.json")
    assert load_plan(tmp_path / "p.json").layout("w").splitting(1) == ("model", "data")


def test_files_have_no_absolute_paths(tmp_path):
    small_plan().save(tmp_path / "p.json")
    assert "someone" not in (tmp_path / "p.json").read_text()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no json", "'FILE' is not a plan file: JSON is malformed"),
        ("[1, 2]", "'FILE' is not a plan file: Expected `object`, got `array`"),
        ('{"version": 1}', "'FILE' is not a plan file: Object missing required field `format`"),
        ('{"format": "x", "version": 1}', "'FILE' is not a plan file: its format is 'x'"),
        (
            '{"format": "meshdsl plan", "version": 1}',
            "'FILE' is a damaged plan file:\n  Object missing required field `name`",
        ),
    ],
)
def test_what_is_no_plan_file(tmp_path, text, said):
    file = tmp_path / "p.json"
    file.write_text(text)
    with pytest.raises(PlanFileError) as caught:
        load_plan(file)
    assert str(caught.value).startswith(said.replace("FILE", str(file)))


def test_a_program_is_no_plan_file():
    with pytest.raises(PlanFileError, match=r"is not a plan file but a program\n.* the saved plan first"):
        load_plan(__file__)


def test_a_missing_file():
    with pytest.raises(PlanFileError) as caught:
        load_plan("nowhere/p.json")
    assert str(caught.value) == "cannot read the plan file 'nowhere/p.json': No such file or directory"


def test_a_plan_file_of_another_version(tmp_path):
    file = tmp_path / "p.json"
    small_plan().save(file)
    file.write_text(file.read_text().replace('"version":1', '"version":99'))
    with pytest.raises(PlanFileError) as caught:
        load_plan(file)
    assert str(caught.value) == (
        f"'{file}' is a plan file of another version:\n"
        "  version: 99 in the file, 1 in this meshdsl\n"
        "plan again and save it"
    )
