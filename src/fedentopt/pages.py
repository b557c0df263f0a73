"""HTML pages: their tables, and the file on disk, where an old page is renewed and whatever else is there stays."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from fedentopt.errors import InputError
from fedentopt.files import expand_home, unwritable, written_aside

RESULTS_PAGE = "report.html"  # of a folder of runs
_OURS = b'<meta name="generator" content="fedentopt '


def html_table(
    identity: str, caption: str, heads: Sequence[tuple[str, str]], lines: Iterable[str], *, sortable: bool = True
) -> str:
    """A table of lines that are HTML already; `heads` are names and kinds, text or number, by which scripts sort."""
    cells = []
    for name, kind in heads:
        title = escape(name)
        button = f'<button type="button" data-sort="{kind}">{title}<span aria-hidden="true"></span></button>'
        cells.append(f'<th scope="col" class="{kind}">{button if sortable else title}</th>')
    name = f' id="{identity}"' if identity else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table{name}>'
        f"<caption>{escape(caption)}</caption><thead><tr>{''.join(cells)}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def check_page(path: Path | str) -> Path:
    """The path of a page, ~ expanded; refused: a folder, and a file that is there and was not made by fedentopt."""
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"page: {path!r} cannot be used; accepted: the name of a file")
    path = expand_home(path)
    try:
        if path.is_dir():
            raise InputError(f"{path}: is a folder; accepted: --out with the name of a file")
        if path.is_file() and path.stat().st_size and _OURS not in _start(path):
            raise InputError(f"{path}: is there and no page of fedentopt; accepted: --out with another name")
    except OSError as error:
        raise unwritable(path, error) from error
    return path


def save_page(text: str, path: Path | str) -> Path:
    """Write a page, in a folder that is made where there is none; what `check_page` refuses is not overwritten."""
    path = check_page(path)
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(path, error) from error
    with written_aside(path) as file:
        file.write(text.encode())
    return path


def _start(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(4096)
