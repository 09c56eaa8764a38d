"""The page: values as JSON in a template, with its style and its script inside.

Names come from programs and may be anything. In the page's own text the template engine escapes
them; all else reaches the script as JSON, in which nothing can end the element that holds it, and
the script writes text, never markup. Should that fail, the page's policy runs no script but its
own, known by its hash, and loads nothing.
"""

import json
from base64 import b64encode
from functools import cache
from hashlib import sha256
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from meshdsl.errors import ArgumentError, is_a
from meshdsl.plan.report.data import compared, line_costs, report_data
from meshdsl.plan.types import PlanData
from meshdsl.util.text import bytes_text, seconds_text, write_text

if TYPE_CHECKING:
    from jinja2 import Environment

_SCRIPTS = ("base", "tables", "lines", "communication", "arrays", "memory", "timeline", "pictures", "compare", "main")
_ESCAPED = {ord(c): f"\\u{ord(c):04x}" for c in "<>&"}  # JSON is ASCII otherwise
_COSTLIEST = 10


def report_html(plan: PlanData, against: PlanData | None = None) -> str:
    """The report as one HTML document.

    Args:
      against: a second plan to compare with from the start.
    """
    script = _script()
    return _render(
        "page.html",
        plan=plan,
        linked=True,
        style=Markup(_file("style.css")),
        script=Markup(script),
        script_hash=b64encode(sha256(script.encode()).digest()).decode(),
        data=_embedded(report_data(plan)),
        against=_embedded(None if against is None else compared(against)),
        **_summary(plan),
    )


def summary_html(plan: PlanData) -> str:
    """Totals and the costliest lines, for notebooks."""
    return _render("summary.html", plan=plan, linked=False, **_summary(plan))


def save_report(plan: PlanData, path: str | PathLike[str], against: PlanData | None = None) -> None:
    """Write the report; ArgumentError for what is no path or no plan, MeshDSLError if it cannot be written."""
    if against is not None and not isinstance(against, PlanData):
        raise ArgumentError(f"report against: {is_a(against)}, not a plan; md.load_plan(file) reads one")
    write_text(path, report_html(plan, against))


def _summary(plan: PlanData) -> dict[str, Any]:
    costliest = sorted(line_costs(plan), key=lambda line: -line.total)[:_COSTLIEST]
    return {
        "costliest": [line for line in costliest if line.total],
        "sent": sum(c.seconds * c.trips for c in plan.collectives),
        "runs": sum(c.trips for c in plan.collectives),
    }


def _embedded(values: Any) -> Markup:
    """JSON that stands in a script element: nothing in it is markup."""
    text = json.dumps(values, separators=(",", ":"), allow_nan=False)
    return Markup(text.translate(_ESCAPED))


def _script() -> str:
    parts = "\n".join(_file(f"{name}.js") for name in _SCRIPTS)
    return f'"use strict";\n(() => {{\n{parts}\n}})();\n'


@cache
def _file(name: str) -> str:
    return (Path(__file__).parent / "templates" / name).read_text(encoding="utf-8")


def _render(name: str, **values: Any) -> str:
    return str(_environment().get_template(name).render(values))


@cache
def _environment() -> "Environment":
    from jinja2 import Environment, PackageLoader, StrictUndefined  # slow to import, and only reports need it

    made = Environment(
        loader=PackageLoader("meshdsl.plan.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(bytes=bytes_text, seconds=seconds_text)
    return made
