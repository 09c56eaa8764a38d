"""The report: a plan as one HTML page that needs nothing but a browser, and as a trace for Perfetto."""

from meshdsl.report.data import report_data
from meshdsl.report.page import report_html, save_report, summary_html
from meshdsl.report.perfetto import perfetto_trace, save_perfetto

__all__ = ["perfetto_trace", "report_data", "report_html", "save_perfetto", "save_report", "summary_html"]
