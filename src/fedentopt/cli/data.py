"""`fedentopt data`: what data sets there are, getting them, checking them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from fedentopt.cli.console import Commands, err, note, out, print_json, print_table
from fedentopt.errors import InputError

DATA_DIR = typer.Option(
    None, "--data-dir", help="Folder of the data sets. Default: FEDENTOPT_DATA, else the user's cache folder."
)
JSON = typer.Option(False, "--json", help="Print JSON instead of a table.")

data = typer.Typer(cls=Commands, help="List, fetch and check data sets.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the command group to the command line."""
    app.add_typer(data, name="data")


@data.command("list")
def list_(data_dir: Path | None = DATA_DIR, json: bool = JSON) -> None:
    """Show every data set known by name, whether its files are there, and where they would go."""
    from fedentopt.datasets import resolve_data_dir
    from fedentopt.datasets.catalog import ENTRIES

    folder = resolve_data_dir(data_dir)
    rows = [_state(name, folder) for name in ENTRIES]
    if json:
        print_json({"data_dir": str(folder), "datasets": rows})
        return
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("name", no_wrap=True)
    table.add_column("what")
    for heading in ("classes", "train", "test", "pixels"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for row in rows:
        numbers = (str(row["classes"]), f"{row['train']:,}", f"{row['test']:,}", str(row["image_size"]))
        table.add_row(row["name"], escape(row["title"]), *numbers, row["state"])
    print_table(out(), table)
    out().print(f"\ndata folder: {escape(str(folder))}", soft_wrap=True)
    for row in rows:
        if row["get"]:
            out().print(f"{row['name']}: {escape(row['get'])}", soft_wrap=True)
    out().print("Your own data: give the path of an .npz file or of a folder of class folders instead of a name.")


@data.command()
def fetch(
    name: str = typer.Argument(help="A name from `fedentopt data list`."),
    data_dir: Path | None = DATA_DIR,
    image_size: int | None = typer.Option(
        None, "--image-size", help="Convert to this size; MedMNIST is published in 28, 64, 128 and 224 pixels.", min=8
    ),
    json: bool = JSON,
) -> None:
    """Download the data set NAME (see `fedentopt data list`), compare it with the published checksum, convert it.

    Of sets published in several sizes, the smallest that needs no upscaling is fetched.
    """
    from fedentopt.datasets import default_image_size, resolve_data_dir
    from fedentopt.datasets.conversion import converted
    from fedentopt.datasets.fetch import chosen, complete
    from fedentopt.datasets.fetch import fetch as download
    from fedentopt.datasets.loading import check_image_size, source

    folder = resolve_data_dir(data_dir)
    size = image_size or default_image_size(name)
    check_image_size(size)
    files = chosen(name, folder, size)
    there = complete(name, folder, size)
    if there:
        note(f"{name}: the official files are in {folder} already")
    else:
        megabytes = sum(file.megabytes or 0 for file in files)
        size_told = f", about {megabytes:,} MB" if megabytes else ""
        note(f"{name}: {', '.join(file.filename for file in files)}{size_told}, into {folder}")
        with _bar("downloading", "bytes") as progress:
            download(name, folder, image_size=size, progress=progress)
    with _bar("converting", "images") as progress:
        arrays = converted(source(name, folder, size), folder, size, progress, replaced=not there)
    for told in arrays.notes:
        note(told)
    result = {
        "name": name,
        "data_dir": str(folder),
        "downloaded": not there,
        "train": len(arrays.x_train),
        "test": len(arrays.x_test),
        "image_size": size,
    }
    if json:
        print_json(result)
    else:
        out().print(f"{name}: {result['train']:,} training and {result['test']:,} test images of {size} pixels, ready")


@data.command()
def verify(
    name: str | None = typer.Argument(None, help="A name, or a path of one's own data. Default: all that is there."),
    data_dir: Path | None = DATA_DIR,
    json: bool = JSON,
) -> None:
    """Check files and converted arrays again: sizes, labels, published checksums, every image.

    NAME is a name from `fedentopt data list` or the path of your own data; all that is there is checked without it.
    The exit code is 2 if anything is wrong.
    """
    from fedentopt.datasets import resolve_data_dir
    from fedentopt.datasets.catalog import ENTRIES
    from fedentopt.datasets.verify import begun
    from fedentopt.datasets.verify import verify as check

    folder = resolve_data_dir(data_dir)
    names = [name] if name is not None else [known for known in ENTRIES if begun(known, folder)]
    rows: list[dict[str, Any]] = []
    for known in names:
        for finding in check(known, folder):
            rows.append({"name": known, "what": finding.what, "ok": finding.ok, "detail": finding.detail})
            if not json:
                mark = "[green]ok[/]" if finding.ok else "[bold red]wrong[/]"
                _print_finding(known, mark, finding.what, finding.detail)
    if json:
        print_json({"data_dir": str(folder), "findings": rows})
    wrong = [row for row in rows if not row["ok"]]
    if wrong:
        first = f"{wrong[0]['name']}: {wrong[0]['detail']}"
        raise InputError(f"{len(wrong)} of {len(rows)} checks failed; the first: {first}")


def _print_finding(name: str, mark: str, what: str, detail: str) -> None:
    from rich.markup import escape

    out().print(f"{mark} {escape(name)}: {escape(what)}: {escape(detail)}", soft_wrap=True)


def _state(name: str, folder: Path) -> dict[str, Any]:
    from fedentopt.datasets.catalog import ENTRIES, remedy, resolve_data_dir
    from fedentopt.datasets.verify import caches, sources, there

    entry = ENTRIES[name]
    found = [] if entry.embedded else sources(name, folder)
    sizes = sorted({int(path.name.rpartition("-")[2]) for source in found for path in caches(source, folder)})
    is_there = there(name, folder)
    if entry.embedded or is_there:
        get = ""
    elif entry.downloads:
        get = f"fedentopt data fetch {name}"
        if folder != resolve_data_dir(None):
            get += f" --data-dir {shlex.quote(str(folder))}"
    else:
        get = remedy(name, folder)
    return {
        "name": name,
        "title": entry.title,
        "classes": entry.classes,
        "train": entry.train,
        "test": entry.test,
        "image_size": entry.image_size,
        "state": "built in" if entry.embedded else "missing" if not is_there else "converted" if sizes else "there",
        "converted": sizes,
        "place": entry.place,
        "get": get,
        "download_mb": {download.filename: download.megabytes for download in entry.downloads},
    }


@contextmanager
def _bar(what: str, unit: str) -> Iterator[Any]:
    """A progress bar on a terminal's standard error; nothing elsewhere."""
    console = err()
    if not console.is_terminal:
        yield None
        return
    from rich import progress as rich_progress

    amount = rich_progress.DownloadColumn() if unit == "bytes" else rich_progress.MofNCompleteColumn()
    columns = (rich_progress.TextColumn(what), rich_progress.BarColumn(), amount, rich_progress.TimeRemainingColumn())
    with rich_progress.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
