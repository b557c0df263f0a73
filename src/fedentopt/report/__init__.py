"""Tables, plots and the HTML page, made from results alone."""

from fedentopt.report.page import render_runs, write_page, write_report

__all__ = ["render_runs", "write_page", "write_report"]
