"""HTML of results in notebooks: complete, and text only whatever names hold."""

from dataclasses import replace
from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import pytest

import meshdsl as md
from meshdsl.util.html import tables_html
from meshdsl.util.text import bytes_text

BAD = "</td><script>hit()</script>\"'"


class Cells(HTMLParser):
    """Texts of the cells, row by row, and the names of all elements."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.names, self.open = [], set(), []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.names.add(tag)
        if tag == "br":
            return
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def test_short_cells_stay_on_one_line():
    html = tables_html("", [[("change",), ("x" * 25,)]])
    assert html.count("white-space:nowrap") == html.count("overflow-wrap:anywhere") == 1


def test_names_are_text():
    found = Cells(tables_html(BAD, [[("a", BAD), (BAD, "b")]]))
    assert found.rows == [["a", BAD], [BAD, "b"]] and "script" not in found.names


@pytest.mark.parametrize(
    ("layout", "rows"),
    [
        (md.Layout(), []),
        (md.Layout(data=md.S(0), model=md.P), ["data S(0) split: each holds one block of dim 0", "model P partial"]),
        (md.Layout(data=md.S("embed"), model=md.B), ["data S(embed)", "model B broadcast: all hold the same"]),
    ],
)
def test_layouts(layout, rows):
    shown = [" ".join(row) for row in Cells(layout._repr_html_()).rows[1:]]
    assert len(shown) == len(rows) and all(line.startswith(row) for line, row in zip(shown, rows, strict=True))


def test_topologies():
    for name in ("dgx-h100", "tpu-v5p", "cpu"):
        topology = md.topology(name)
        rows = Cells(topology._repr_html_()).rows
        assert len(rows) == 7 + bool(topology.flops8) + len(topology.links)
        assert rows[-1][1] == f"{bytes_text(topology.links[-1].bandwidth)}/s"
    measured = replace(md.topology("cpu"), axes=(("data", md.topology("cpu").links[0]),))
    assert Cells(measured._repr_html_()).rows[-1][0] == "axis data"


def step(w, x):
    return jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)


def test_differences_and_searches_show_the_rows_of_their_text():
    args = jnp.ones((64, 64)), jnp.ones((128, 64))
    found = md.search(step, *args, devices=2, axes=("data", "model"), layouts={"x": "data=S(0)"})
    rows = Cells(found._repr_html_()).rows
    assert [row[0] for row in rows[1:]] == [str(each.mesh) for each in found.candidates if each.plan]
    a, b = (md.parallelize(step, "data=2", {"x": layout}).plan(*args) for layout in ("data=S(0)", "data=B"))
    rows = Cells(a.diff(b)._repr_html_()).rows
    text = " ".join(str(a.diff(b)).split())
    assert len(rows) > 4 and all(cell in text for row in rows for cell in row)
    assert Cells(a.diff(a)._repr_html_()).rows == []
