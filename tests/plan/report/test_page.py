"""The page: complete, self-contained, and safe whatever a program calls its things."""

import json
import re
from base64 import b64encode
from dataclasses import replace
from datetime import date
from hashlib import sha256
from html.parser import HTMLParser

import pytest

import meshdsl as md
from meshdsl.errors import ArgumentError, MeshDSLError
from meshdsl.plan.report import report_data, report_html, summary_html
from meshdsl.plan.report.highlight import highlighted
from meshdsl.plan.types import Timing
from meshdsl.util.lazy import Lazy
from meshdsl.util.text import change_text, percent_text, seconds_text
from tests.plan.conftest import HOSTILE


class Page(HTMLParser):
    """Elements with their attributes, texts of scripts, ids."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.scripts, self.text, self._open = [], [], "", None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self._open = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._open = None

    def handle_data(self, data):
        if self._open == "script":
            self.scripts[-1] += data
        elif self._open != "style":
            self.text += data


def test_the_page_holds_the_data(plan, other):
    page = Page(report_html(plan, against=other))
    data, against, _ = page.scripts
    assert json.loads(data) == json.loads(json.dumps(report_data(plan)))
    assert json.loads(against)["bytes"] == other.bytes
    assert json.loads(Page(report_html(plan)).scripts[1]) is None


def test_the_page_needs_nothing_else(plan):
    text = report_html(plan)
    page = Page(text)
    links = [a[name] for _, a in page.elements for name in ("src", "href", "action", "srcset") if name in a]
    assert links and all(link.startswith("#") for link in links)
    assert "@import" not in text and "url(" not in text and "fetch(" not in text
    assert set(re.findall(r"https?://[^\"' )]+", text)) <= {"http://www.w3.org/2000/svg"}  # a name, not an address


def test_the_title_says_what_was_drawn_when_and_by_what(plan):
    page = Page(report_html(plan, command="meshdsl report 'p q.json'"))
    assert f"step (conftest.py) on {plan.mesh}" in page.text and f"meshdsl {md.__version__}" in page.text
    assert date.today().isoformat() in page.text and "meshdsl report 'p q.json'" in page.text


def test_small_shares_are_not_rounded_to_nothing(plan):
    assert 0 < plan.memory < 5e-3 * plan.topology.memory
    assert f"{percent_text(plan.memory / plan.topology.memory)} of" in " ".join(Page(report_html(plan)).text.split())
    assert [percent_text(part) for part in (0, 1e-9, 0.004, 0.26, 1)] == ["0%", "below 0.001%", "0.4%", "26%", "100%"]
    assert [change_text(change) for change in (0, -4e-4, 0.5)] == ["0%", "-0.04%", "+50%"]


def test_utilization_stands_below_the_step_time(plan):
    text = " ".join(Page(report_html(plan)).text.split())
    assert f"MFU {percent_text(plan.mfu)}, compute bound {seconds_text(plan.utilization.compute_bound)}" in text


def test_notes_come_first(plan):
    text = report_html(replace(plan, notes=("a note",)))
    assert text.index("a note") < text.index("costliest-title")


@pytest.mark.parametrize("line", ["", "  return x  # \U0001f600 done", "def f(x): return 'a' + \"b\"", "\tif 1 <"])
def test_highlighting_covers_the_line(line):
    parts = highlighted(line)
    assert sum(length for _, length in parts) == len(line)
    assert all(kind in ("", "keyword", "string", "literal", "comment", "called") for kind, _ in parts)


def test_links_within_the_page_lead_somewhere(plan):
    page = Page(report_html(plan))
    ids = {a["id"] for _, a in page.elements if "id" in a} | {f"line-{i}" for i in range(len(plan.lines))}
    assert {a["href"][1:] for tag, a in page.elements if tag == "a"} <= ids


def test_only_the_page_s_own_script_may_run(plan):
    page = Page(report_html(plan))
    policy = next(a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    own = b64encode(sha256(page.scripts[-1].encode()).digest()).decode()
    assert policy.startswith("default-src 'none'") and f"script-src 'sha256-{own}'" in policy


def test_hostile_names_are_text(hostile, plan):
    page, plain = Page(report_html(hostile, against=hostile)), Page(report_html(plan))
    assert len(page.scripts) == len(plain.scripts) == 3
    assert not [tag for tag, _ in page.elements if tag == "img"]
    assert page.scripts[-1] == plain.scripts[-1]
    data = json.loads(page.scripts[0])
    assert {array["name"] for array in data["arrays"]} >= set(HOSTILE)
    assert [line[2] for line in data["lines"]] == list(HOSTILE)
    assert HOSTILE[0] in page.text and HOSTILE[1] in page.text


def test_hostile_names_are_text_in_notebooks(hostile):
    page = Page(hostile._repr_html_())
    assert page.scripts == [] and not [tag for tag, _ in page.elements if tag == "img"]
    assert HOSTILE[1] in page.text


def test_the_summary_has_totals_and_costliest_lines(plan):
    page = Page(summary_html(plan))
    assert "mesh data=4,model=2" in page.text and not [tag for tag, _ in page.elements if tag == "a"]
    shown = re.findall(r"conftest\.py:\d+", page.text)
    assert shown and len(shown) <= 10


def test_a_plan_that_costs_nothing(plan):
    page = Page(report_html(replace(plan, timing=Lazy.known(Timing()), collectives=())))
    assert "No line costs anything." in page.text


def test_reports_are_written(plan, tmp_path):
    plan.report(tmp_path / "p.html")
    assert (tmp_path / "p.html").read_text(encoding="utf-8") == report_html(plan)
    assert (tmp_path / "p.html").stat().st_size < 150_000


def test_what_cannot_be_written(plan, tmp_path):
    with pytest.raises(MeshDSLError, match=r"cannot write '.*/nowhere/p\.html': No such file or directory"):
        plan.report(tmp_path / "nowhere" / "p.html")
    with pytest.raises(ArgumentError, match="None is a NoneType, not the path of a file to write"):
        plan.report(None)
    with pytest.raises(ArgumentError, match=r"report against: 'p\.json' is a str, not a plan"):
        plan.report(tmp_path / "p.html", against="p.json")
