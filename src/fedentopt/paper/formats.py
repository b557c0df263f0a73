"""A table as text, in Markdown and in LaTeX, and parts of a page that fold. `**...**` in a cell means bold in both."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

PIPE = "\\|"  # in a cell, of a table in Markdown


@dataclass(frozen=True)
class Section:
    """Rows under a common heading, that of a setting or, of a `summary`, of several."""

    heading: str
    rows: tuple[tuple[str, ...], ...]
    summary: bool = False


@dataclass(frozen=True)
class Table:
    """A printed table: all cells are text by now. The first column is left-aligned, the others right.

    `part` tells tables of one name apart. `found` are the sentences of `note` that say what the figures come to, for a
    terminal, which does without the rest.
    """

    name: str
    title: str
    note: str
    columns: tuple[str, ...]
    sections: tuple[Section, ...]
    part: str = ""
    found: str = ""

    @property
    def label(self) -> str:
        """What LaTeX refers to it by."""
        return f"tab:{self.name}:{self.part}" if self.part else f"tab:{self.name}"


def markdown(table: Table, level: int = 1) -> str:
    """The table with its title as a heading of this level; sections become headings one level below."""
    lines = [f"{'#' * level} {table.title}", "", table.note, ""]
    for section in table.sections:
        if section.heading:
            lines += [f"{'#' * (level + 1)} {section.heading}", ""]
        lines.append(grid(table.columns, section.rows, words=1))
    return "\n".join(lines)


def grid(columns: Sequence[str], rows: Sequence[Sequence[str]], *, words: int | None = None) -> str:
    """A table in Markdown without a title. The first columns, so many as hold `words`, are left-aligned (all of them if
    not told), the others right."""
    left = len(columns) if words is None else words
    lines = [f"| {' | '.join(cell.replace('|', PIPE) for cell in row)} |" for row in (columns, *rows)]
    lines.insert(1, f"|{' --- |' * left}{' ---: |' * (len(columns) - left)}")
    return "\n".join([*lines, ""])


def folded(summary: str, inside: str) -> str:
    """A part that opens by a click, here and in the built documentation; its headings are words in bold."""
    lines = [f"**{line.lstrip('# ')}**" if line.startswith("#") else line for line in inside.strip("\n").splitlines()]
    return "\n".join(['<details markdown="1">', f"<summary>{summary}</summary>", "", *lines, "", "</details>", ""])


def latex(table: Table) -> str:
    """The table as a `longtable` with `booktabs` rules, so that it may break over pages."""
    width = len(table.columns)
    head = [
        "% needs \\usepackage{booktabs,longtable}",
        f"\\begin{{longtable}}{{l{'r' * (width - 1)}}}",
        f"\\caption{{{_tex(table.title)}. {_tex(table.note)}}}\\label{{{table.label}}}\\\\",
        "\\toprule",
        f"{' & '.join(_tex(name) for name in table.columns)} \\\\",
        "\\midrule",
        "\\endhead",
    ]
    body: list[str] = []
    for number, section in enumerate(table.sections):
        if number:
            body.append("\\midrule")
        if section.heading:
            body.append(f"\\multicolumn{{{width}}}{{l}}{{\\emph{{{_tex(section.heading)}}}}} \\\\*")
        body += [f"{' & '.join(_tex(cell) for cell in row)} \\\\" for row in section.rows]
    return "\n".join([*head, *body, "\\bottomrule", "\\end{longtable}", ""])


_TEX = {
    "\\": "\\textbackslash{}",
    "±": "$\\pm$",
    "–": "--",
    "ε": "$\\varepsilon$",
    "µ": "$\\mu$",
    "→": "$\\rightarrow$",
    "²": "$^2$",
    "×": "$\\times$",
    **{char: f"${char}$" for char in "<>|"},  # which the default encoding of fonts has other letters for
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
    **{char: f"\\{char}" for char in "&%$#_{}"},
}


def _tex(text: str) -> str:
    escaped = "".join(_TEX.get(char, char) for char in text)
    escaped = re.sub(r"\*\*(.+?)\*\*", r"\\textbf{\1}", escaped)
    escaped = re.sub(r"`(.+?)`", r"\\texttt{\1}", escaped)
    return re.sub(r"(?<![\w\]}.])-(?=\d)", "$-$", escaped)  # a minus sign, not a hyphen
