"""The page of the planner's figures: a part that is measured is written anew, the others stay."""

import shutil

import pytest

from bench.planner import page
from bench.report import page_section
from bench.zoo import gaps

NOTHING = {part: [] for part in page.SECTIONS}
ROW = {"data": 3, "model": 5, "equations": 7, "cost": 1.0, "gap": 0.0, "seconds": 2.0}


@pytest.fixture
def folder(tmp_path):
    shutil.copy(page.DOCS / page.PAGE, tmp_path)
    return tmp_path


def test_of_parts_that_were_not_measured_the_page_keeps_what_it_says(folder):
    before = (folder / page.PAGE).read_text()
    page.write(NOTHING, "some versions", folder)
    after = (folder / page.PAGE).read_text()
    assert after.splitlines()[:-1] == before.splitlines()[:-1] and after.endswith("; some versions\n")


def test_a_part_that_was_measured_is_written_anew(folder):
    before = page_section((folder / page.PAGE).read_text(), page.AXES)
    page.write({**NOTHING, "sizes": [ROW]}, "some versions", folder)
    after = (folder / page.PAGE).read_text()
    assert page_section(after, page.AXES) == before and len(before) > 5
    rows = [line for line in page_section(after, page.SIZES) if line.startswith("| 3")]
    assert rows == ["| 3 | 5 | 7 | 1 s | 0% | 2.0 |"]


def test_gaps_of_the_zoo_take_the_place_of_those_before():
    before = (page.DOCS / "zoo.md").read_text()
    after = gaps.replace_section(before, f"{gaps.TITLE}\nnothing")
    assert page_section(after, gaps.TITLE)[-1] == "nothing"
    assert gaps.replace_section(after, "\n".join(page_section(before, gaps.TITLE))) == before


def test_a_page_that_is_not_there_has_what_was_measured(tmp_path):
    page.write({**NOTHING, "sizes": [ROW]}, "some versions", tmp_path)
    titles = [line for line in (tmp_path / page.PAGE).read_text().splitlines() if line.startswith("## ")]
    assert titles == ["## How plans are proved", "## Time against the sizes of axes", "## Another pin"]
