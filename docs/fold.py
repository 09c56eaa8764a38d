"""Folds the log of a page of evidence: what follows the summary at its top. A link into the log opens it."""

from docutils import nodes
from sphinx.application import Sphinx

BEGIN, END = "<details><summary>How it was measured, and all figures</summary>", "</details>"
OPEN = """
const openLog = () => document.getElementById(location.hash.slice(1))?.closest("details")?.setAttribute("open", "");
addEventListener("hashchange", openLog);
addEventListener("DOMContentLoaded", openLog);
"""


def fold(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Puts what follows the summary, a quote, into an element that the reader opens."""
    section = doctree.next_node(nodes.section)
    summary = section and section.next_node(nodes.block_quote)
    if page.startswith("evidence/") and section and summary and summary.parent is section:
        section.insert(section.index(summary) + 1, nodes.raw("", BEGIN, format="html"))
        section.append(nodes.raw("", END, format="html"))


def setup(app: Sphinx) -> None:
    """Adds the fold to the build."""
    app.connect("doctree-resolved", fold)
    app.add_js_file(None, body=OPEN)
