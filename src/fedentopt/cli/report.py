"""`fedentopt report`: the HTML page of a results folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedentopt.cli.console import out as console
from fedentopt.cli.console import print_json


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def report(
        directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder with results: runs in it, or one run.")],
        out: Annotated[Path | None, typer.Option("--out", help="The page's file (default: DIR/report.html).")] = None,
        open_: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
        json_: Annotated[bool, typer.Option("--json", help="Print the page's path and size as JSON.")] = False,
    ) -> None:
        """Make one self-contained HTML page from the runs of a folder, finished or not."""
        from fedentopt.report import write_report

        page = write_report(directory, out=out)
        size = page.stat().st_size
        if json_:
            print_json({"report": str(page), "bytes": size})
        else:
            console().print(f"{page}  ({size / 1e6:.1f} MB)", markup=False, soft_wrap=True)
        if open_:
            typer.launch(page.resolve().as_uri())
