"""The page: values as JSON in a template that contains its style and script.

Names come from programs and may be anything. The template engine escapes them in the page's own text. Everything else
reaches the script as JSON that cannot end the element around it, and the script writes text, never markup. Should that
fail, the page's content security policy runs only its own script, identified by its hash, and loads nothing.
"""

import json
from base64 import b64encode
from collections import defaultdict
from datetime import date
from functools import cache
from hashlib import sha256
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from meshdsl.errors import ArgumentError, is_a
from meshdsl.plan.report.data import comparison_data, line_costs, report_data
from meshdsl.plan.types import PlanData
from meshdsl.util.files import write_text
from meshdsl.util.text import bytes_text, percent_text, seconds_text
from meshdsl.util.version import version

if TYPE_CHECKING:
    from jinja2 import Environment

_SCRIPTS = ("base", "tables", "lines", "communication", "arrays", "memory", "timeline", "pictures", "compare", "main")
_ESCAPED = {ord(c): f"\\u{ord(c):04x}" for c in "<>&"}  # JSON is ASCII otherwise
_COSTLIEST = 10  # lines of the summary


def report_html(plan: PlanData, against: PlanData | None = None, command: str = "") -> str:
    """The report as one HTML document.

    Args:
      plan: the plan to draw.
      against: a second plan to compare with; the page can also open one later.
      command: the command line that asked for the report, if one did; shown below the title.
    """
    script = _script()
    return _render(
        "page.html",
        plan=plan,
        linked=True,
        file=_main_file(plan),
        made=f"meshdsl {version()}, {date.today().isoformat()}",
        command=command,
        style=Markup(_file("style.css")),
        script=Markup(script),
        script_hash=b64encode(sha256(script.encode()).digest()).decode(),
        data=_embedded(report_data(plan)),
        against=_embedded(None if against is None else comparison_data(against)),
        **_summary(plan),
    )


def summary_html(plan: PlanData) -> str:
    """Totals and the costliest lines, for notebooks."""
    return _render("summary.html", plan=plan, linked=False, **_summary(plan))


def save_report(plan: PlanData, path: str | PathLike[str], against: PlanData | None = None, command: str = "") -> None:
    """Writes the report.

    Raises:
      ArgumentError: ``path`` is not a path, or ``against`` not a plan.
      MeshDSLError: the file cannot be written.
    """
    if against is not None and not isinstance(against, PlanData):
        raise ArgumentError(f"report against: {is_a(against)}, not a plan; md.load_plan(file) reads one")
    write_text(path, report_html(plan, against, command))


def _main_file(plan: PlanData) -> str:
    """The file whose lines cost most; empty if none is known."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for line in line_costs(plan):
        file, colon, _ = line.source.rpartition(":")
        if colon:
            seconds[file] += line.total
    return max(seconds, key=seconds.__getitem__, default="")


def _summary(plan: PlanData) -> dict[str, Any]:
    costliest = sorted(line_costs(plan), key=lambda line: -line.total)[:_COSTLIEST]
    return {
        "costliest": [line for line in costliest if line.total],
        "sent": sum(c.seconds * c.trips for c in plan.collectives),
        "runs": sum(c.trips for c in plan.collectives),
    }


def _embedded(values: Any) -> Markup:
    """JSON for a script element, without any markup in it."""
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

    environment = Environment(
        loader=PackageLoader("meshdsl.plan.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(bytes=bytes_text, seconds=seconds_text, percent=percent_text)
    return environment
