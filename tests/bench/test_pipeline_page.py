"""What a run of bench.pipeline measured is put where the page names it, and nowhere else."""

import pytest

import meshdsl as md
from bench.pipeline_page import PAGE, draw, write
from meshdsl.schedules.pipelined import Pipelined


def test_parts_of_the_page_are_replaced(tmp_path):
    copy, text = tmp_path / "page.md", PAGE.read_text()
    copy.write_text(text)
    write({"machine": "here\n", "schedules": "| a |", "memory": r"\1"}, copy)
    found = copy.read_text()
    assert "<!-- machine -->\nhere\n<!-- end of machine -->" in found and r"\1" in found
    assert found.splitlines()[0] == text.splitlines()[0] and found.endswith(text[-200:])
    with pytest.raises(ValueError, match="has no <!-- time -->"):
        write({"time": ""}, copy)


def test_the_picture_has_a_bar_per_task(tmp_path):
    draw(Pipelined(md.Pipeline(3), "pipe", 2, layers=(1, 1)), tmp_path / "picture.svg")
    text = (tmp_path / "picture.svg").read_text()
    assert text.count("#1b4f91") == text.count("#6f8fb5") == 6 and "rank 1" in text
