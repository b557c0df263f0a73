"""Tables, plots and the HTML page, made from results on disk alone."""

from fedentopt.report.page import write_report

__all__ = ["write_report"]
