"""The report: a plan as an HTML page that needs only a browser, a trace for Perfetto, a graph for Model Explorer."""

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
