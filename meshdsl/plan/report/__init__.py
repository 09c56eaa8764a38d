"""A plan drawn: an HTML page that works offline, a trace for Perfetto, a graph for Model Explorer.

traces           the predicted step in time: events and memory, and the Trace Event Format of Perfetto
data             everything that the page shows, as plain values
page             the page: those values as JSON in a template (``templates/``), and a summary for notebooks
model_explorer   the program with its layouts and collectives as a graph
"""

from meshdsl.plan.report.data import report_data
from meshdsl.plan.report.model_explorer import model_explorer_graphs, save_model_explorer
from meshdsl.plan.report.page import report_html, save_report, summary_html
from meshdsl.plan.report.traces import perfetto_trace, save_perfetto

__all__ = [
    "model_explorer_graphs",
    "perfetto_trace",
    "report_data",
    "report_html",
    "save_model_explorer",
    "save_perfetto",
    "save_report",
    "summary_html",
]
