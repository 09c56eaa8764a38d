"""Damaged plan files: each one clear error that names the entry, whatever was cut off, merged or edited."""

import json

import pytest

from meshdsl.errors import PlanFileError, is_a
from meshdsl.plan import load_plan
from tests.programs import small_plan


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "p.json"
    small_plan().save(path)
    return path


def refused(file):
    with pytest.raises(PlanFileError) as caught:
        load_plan(file)
    title, *rows, remedy = str(caught.value).splitlines()
    assert title == f"'{file}' is a damaged plan file:"
    assert remedy == "restore the file as it was saved, or plan again and save the new plan"
    return [row.removeprefix("  ") for row in rows]


def put(value, *path):
    """An edit: the entry at ``path`` becomes ``value``."""

    def edit(data):
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = value

    return edit


def edited(file, *edits):
    data = json.loads(file.read_text())
    for edit in edits:
        edit(data)
    file.write_text(json.dumps(data, indent=1))


def test_other_white_space_is_no_damage(file):
    edited(file)
    assert load_plan(file) == small_plan()


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (
            put("dta=S(1) model=B", "layouts", 0),
            "layouts[0] 'dta=S(1) model=B': no axis 'dta' in the mesh; did you mean 'data'?",
        ),
        (put("data=S(1)", "layouts", 0), "layouts[0] 'data=S(1)': no placement for axis model"),
        (
            put("data=S(x) model=B", "layouts", 0),
            "layouts[0] 'data=S(x) model=B': data=S(x) names a dim; plan files number dims",
        ),
        (
            put("data=S(0) model=B", "layouts", 0),
            "inputs[0] w: data=S(1) model=B, but value 0 has layout data=S(0) model=B",
        ),
        (
            put("data=S(0) model=B", "inputs", 0, "layout"),
            "inputs[0] w: data=S(0) model=B, but value 0 has layout data=S(1) model=B",
        ),
        (
            put("data=S(5) model=B", "inputs", 0, "layout"),
            "inputs[0] w: data=S(5) model=B splits dim 5, which float32[8,16] does not have",
        ),
        (put("", "inputs", 0, "dtype"), "inputs[0] w: no dtype ''"),
        (put(-1.0, "lower_bound"), "lower_bound: -1.0, which is not from 0 to 1e+18"),
        (put([6, 16], "inputs", 0, "shape"), None),
        (
            put("data=S(0) model=B", "outputs", 0, "layout"),
            "outputs[0] 0: data=S(0) model=B, but w, which it aliases, has layout data=S(1) model=B",
        ),
        (put(0, "mesh", "data"), "mesh: a size is a whole number >= 1"),
        (lambda d: d["collectives"].pop(0), "collectives: missing for moves[0], all-gather over data of 384 bytes"),
        (put(5, "collectives", 1, "bytes"), "collectives[1]: no reshard step sends all-reduce over data of 5 bytes"),
        (
            put(["model"], "collectives", 1, "axes"),
            "collectives[1]: no reshard step sends all-reduce over model of 6 bytes",
        ),
        (
            put([["S(0)", "B"], ["S(0)"], 0, []], "signatures", 1),
            "uses[0]: operation 0 uses operand 0 with model=B, but its signature has S(0)",
        ),
        (put([0, [0]], "ops", 0), "ops[0]: 1 signatures for 2 mesh axes"),
        (put([0, [0, 9]], "ops", 0), "ops[0]: no signature 9"),
        (put([0, [0, -1]], "ops", 0), "ops[0]: no signature -1"),
        (put([0, 0], "values", 1), "values[1]: duplicate of values[0], value 0"),
        (put([3, 7], "values", 3), "values[3]: no layout 7; the file has layouts 0 to 3"),
        (put([1, 0, 0], "uses", 2), "uses[2]: operation 1 uses operand 0 with data=S(1), but its signature has S(0)"),
        (
            put(1, "moves", 0, 5),
            "moves[0]: starts from data=S(0) model=B, but value 0 is available as data=S(1) model=B",
        ),
        (put(1, "moves", 0, 6), "moves[0]: no all-gather over data leads from data=S(1) model=B to data=S(0) model=B"),
        (
            put("all-reduce", "moves", 0, 1),
            "moves[0]: no all-reduce over data leads from data=S(1) model=B to data=B model=B",
        ),
        (
            put(["model"], "moves", 0, 2),
            "moves[0]: no all-gather over model leads from data=S(1) model=B to data=B model=B",
        ),
        (put(77, "moves", 0, 0), "moves[0]: no value 77"),
        (put(77, "spans", 0, 0), "spans[0]: no line 77"),
        (put(3, "spans", 0, 7), "spans: 4 collectives are waited for, of 2"),
        (put(1e-9, "seconds"), "seconds: changed since it was saved"),
        (put(1.0, "lower_bound"), "lower_bound: changed since it was saved"),
        (put(12, "peak"), "peak: changed since it was saved"),
        (put(1e99, "topology", "flops32"), "topology: changed since it was saved"),
        (put([], "notes"), "notes: changed since it was saved"),
        (put([], "seals"), "name: changed since it was saved"),
    ],
)
def test_an_edited_entry_is_named(file, edit, said):
    edited(file, edit)
    rows = refused(file)
    assert said is None or said in rows, rows


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (put("many", "peak"), "Expected `int`, got `str` - at `$.peak`"),
        (put(None, "inputs"), "Expected `array`, got `null` - at `$.inputs`"),
        (put("data=Q", "layouts", 2), "a placement is S(dim), B, P, P(max) or P(min), not 'Q' - at `$.layouts[2]`"),
        (
            put([["S(0)", "Q"], ["S(0)"], 0, []], "signatures", 0),
            "a placement is S(dim), B, P, P(max) or P(min), not 'Q' - at `$.signatures[0][0][1]`",
        ),
        (
            put(3, "layouts", 2),
            "3 is no layout; write text such as 'data=S(0) model=B', or a Layout - at `$.layouts[2]`",
        ),
        (put([0], "uses", 1), "Expected `array` of length 3 - at `$.uses[1]`"),
        (lambda d: d.pop("moves"), "Object missing required field `moves`"),
        (put(1, "movs"), "Object contains unknown field `movs`"),
    ],
)
def test_what_is_of_a_wrong_type_is_named(file, edit, said):
    edited(file, edit)
    assert refused(file) == [said]


def places(tree, path=()):
    """The path of every number, text and bool in a tree of lists and dicts."""
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [p for key, x in entries for p in places(x, (*path, key))] or ([path] if path else [])


def test_no_edit_goes_unseen(file):
    data = json.loads(file.read_text())
    for path in places(data):
        for value in (-1, 10**30, 0.5, "x", "", None, [], {}, True):
            changed = json.loads(json.dumps(data))
            put(value, *path)(changed)
            file.write_text(json.dumps(changed))
            if json.dumps(changed) != json.dumps(data):
                with pytest.raises(PlanFileError, match="plan file"):
                    load_plan(file)


def test_a_file_that_was_cut_off(file):
    text = file.read_bytes()
    for length in range(0, len(text) - 2, 97):
        file.write_bytes(text[:length])
        with pytest.raises(PlanFileError) as caught:
            load_plan(file)
        assert "is not a plan file: " in str(caught.value) or "is a damaged plan file:" in str(caught.value)


def test_what_is_no_text(file):
    for data in (b"\xff\xfe" * 9, b"[" * 100_000, file.read_bytes().replace(b"model.py", b"mod\xffl.py")):
        file.write_bytes(data)
        with pytest.raises(PlanFileError, match="plan file"):
            load_plan(file)


def test_every_entry_that_is_taken_away_is_missed(file):
    data = json.loads(file.read_text())
    for name, entries in data.items():
        for i in range(len(entries) if isinstance(entries, list) else 0):
            file.write_text(json.dumps({**data, name: entries[:i] + entries[i + 1 :]}))
            with pytest.raises(PlanFileError, match="is a damaged plan file"):
                load_plan(file)


@pytest.mark.parametrize("path", [None, 3, ["p.json"]])
def test_what_is_no_path(path):
    for use in (load_plan, small_plan().save):
        with pytest.raises(PlanFileError) as caught:
            use(path)
        assert str(caught.value) == f"{is_a(path)}, not the path of a plan file"


def test_a_file_that_cannot_be_written(tmp_path):
    with pytest.raises(PlanFileError) as caught:
        small_plan().save(tmp_path / "nowhere" / "p.json")
    assert str(caught.value) == f"cannot write the plan file '{tmp_path}/nowhere/p.json': No such file or directory"
