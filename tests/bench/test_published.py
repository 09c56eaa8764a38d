"""Published rows as planned steps: every row is one or says why not; how errors and ranks are counted."""

from dataclasses import replace

import pytest

from bench.published import dgxc, maxtext, mosaic
from bench.published.__main__ import TABLES
from bench.published.case import rows
from bench.published.plot import scatter
from bench.published.predict import Prediction, predict
from bench.published.score import error, errors, kendall
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.topology import topology

CASES = {name: list(cases()) for name, cases in TABLES.items()}
REASONS = {module.TABLE: module.reason for module in (dgxc, maxtext, mosaic)}


@pytest.mark.parametrize("name", TABLES)
def test_every_row_is_a_step_or_says_why_not(name):
    unscored = [i for i, row in enumerate(rows(name)) if REASONS.get(name, lambda _: "")(row)]
    assert sorted([case.number for case in CASES[name]] + unscored) == list(range(len(rows(name))))
    for case in CASES[name]:
        mesh, count = Mesh.parse(case.mesh, case.hardware), case.pipeline.microbatches if case.pipeline else 1
        assert case.measured > 0 and case.batch % (count * mesh.sizes_by_name["data"]) == 0, case.label
        row = rows(name)[case.number]
        assert mesh.size == int(row.get("gpus") or row["chips"]), case.label


def scored(*seconds):
    """Configurations of one model that took 1, 2, 4 ... seconds, with these predictions."""
    case = CASES["korthikanti_table5"][0]
    made = [replace(case, number=i, measured=2.0**i) for i in range(len(seconds))]
    return [(c, Prediction(s, s, 0.0, 0.0, 0.0)) for c, s in zip(made, seconds, strict=True)]


def test_errors_and_ranks_of_rows():
    found = scored(1.1, 1.8, 4.0, 3.0)
    assert [error(row) for row in found] == pytest.approx([0.1, -0.1, 0.0, -0.625])
    assert (errors(found).median, errors(found).most) == pytest.approx((0.1, 0.1 + 0.7 * 0.525))
    assert kendall(found) == (5, 1)  # the last two are the wrong way round
    same = [(replace(case, measured=1.0), p) for case, p in found]
    assert kendall(same) == (0, 0)
    assert scatter(found, ["korthikanti_table5"]).count("<title>") == 4


def test_a_row_is_predicted_by_its_plan():
    (case,) = (c for c in CASES["korthikanti_table5"] if "22B" in c.label)
    found = predict(case, topology(case.hardware))
    assert found.planned == found.seconds and 0 < found.sent < found.seconds  # 2022: nothing is overlapped
    assert abs(error((case, found))) < 0.25
    hidden = predict(replace(case, overlap=True), topology(case.hardware))
    assert hidden.planned == found.planned and hidden.seconds < found.seconds


@pytest.mark.sweep
def test_a_row_with_stages_is_predicted_by_a_stage():
    (case,) = (c for c in CASES["megatron_sc21_table1"] if "39B" in c.label)
    stage = case.stage(3)
    assert (stage.stages, stage.microbatches, stage.batch, stage.config.layers) == (1, 3, 384, 24)
    assert stage.config.remat == "all" and "pipe" not in f"{stage.mesh} {stage.rules}"
    known = topology(case.hardware)
    found, chunked = predict(case, known), predict(replace(case, chunks=4), known)
    assert abs(error((case, found))) < 0.15
    each = (found.seconds - chunked.seconds) / (3 / 4)  # a microbatch more of bubble, three quarters of it gone
    assert each == pytest.approx(found.seconds / 13, rel=0.15)  # the head is on one stage, the update is no part of it
