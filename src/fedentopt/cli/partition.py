"""`fedentopt partition`: label-skewed splits of a label file or a data set."""

from __future__ import annotations

import os
import tokenize
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer

from fedentopt.cli.console import out, print_json
from fedentopt.errors import InputError
from fedentopt.files import csv_text, written_aside
from fedentopt.labels import check_labels
from fedentopt.partition import FORMS, NATURAL, Partition, parse
from fedentopt.partition import partition as split
from fedentopt.simulation.config import SMALL_DATASETS
from fedentopt.tables import counts_lines
from fedentopt.tables.rows import NOT_CSV

if TYPE_CHECKING:
    from fedentopt.datasets.clients import ClientIds


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("partition")(partition)


def partition(
    spec: Annotated[str, typer.Argument(metavar="SPLIT", help=f"{FORMS}.")],
    labels: Annotated[
        Path | None, typer.Option(help=".npy file with one class number per sample, whole numbers from 0.")
    ] = None,
    dataset: Annotated[
        str | None, typer.Option(help="Split the training samples of this data set instead (`fedentopt data list`).")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of the data sets, as for `fedentopt data`.")] = None,
    clients: Annotated[
        int | None, typer.Option(min=1, help="Number of clients, K. Default: 100; under natural as the data names.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draws.")] = 0,
    min_samples: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Fewest samples a client may end with under dir:BETA and quantity:BETA. Default: 10, for small data "
            "sets 1.",
        ),
    ] = None,
    out_file: Annotated[
        Path | None,
        typer.Option("--out", help="CSV file to write the label counts to, as `fedentopt select` reads it."),
    ] = None,
    indices: Annotated[
        Path | None, typer.Option(help=".npz file to write the sample numbers to, one array per client: 0, 1, ...")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Split samples among clients. SPLIT is dir:BETA (Dirichlet shares of every class), classes:J (J classes per
    client), shards:S (S pieces of the sorted samples), quantity:BETA (sizes drawn, labels alike), mixed:BETA,...
    (clients that differ in their skew), dir:BETA+quantity:BETA (skewed in labels and sizes), natural (as the data
    says) or iid.
    """
    kind = parse(spec)
    if out_file is not None and out_file.suffix.lower() in NOT_CSV:
        raise InputError(f"--out: {out_file} would hold CSV under another kind's name; accepted: such as counts.csv")
    if out_file is not None and indices is not None and os.path.realpath(out_file) == os.path.realpath(indices):
        raise InputError(f"--out, --indices: both name {out_file}; accepted: a file for each")
    given = labels if dataset is None else Path(dataset)
    for option, path in (("--out", out_file), ("--indices", indices)):
        if path is not None and given is not None and given.exists() and path.exists() and path.samefile(given):
            raise InputError(f"{option}: {path} holds what is to be split; accepted: another file")
    y, names, owners = _labels(labels, dataset, data_dir)
    if min_samples is None:
        min_samples = 1 if dataset in SMALL_DATASETS else 10
    natural = kind.kind == NATURAL and owners is not None
    if clients is None:
        clients = len(owners.names) if natural and owners is not None else 100
    parts = split(
        y, kind, clients, seed, num_classes=None if names is None else len(names), min_samples=min_samples,
        owners=None if owners is None else owners.numbers,
    )  # fmt: skip
    ids: Sequence[object] = owners.names if natural and owners is not None else range(clients)
    classes = names or tuple(str(c) for c in range(parts.counts.shape[1]))
    if out_file is not None:
        text = csv_text(counts_lines(ids, classes, parts.counts))
        with written_aside(out_file) as file:
            file.write(text.encode())
    if indices is not None:
        with written_aside(indices) as file:
            np.savez(file, **{str(k): part for k, part in enumerate(parts.indices)})  # type: ignore[arg-type]
    sizes = parts.counts.sum(axis=1)
    held = np.count_nonzero(parts.counts, axis=1)
    summary = {
        "partition": str(kind), "seed": seed, "clients": clients, "classes": list(classes), "samples": int(y.size),
        "samples_per_client": {"min": int(sizes.min()), "median": float(np.median(sizes)), "max": int(sizes.max())},
        "classes_per_client": {"min": int(held.min()), "mean": float(held.mean()), "max": int(held.max())},
        "out": None if out_file is None else str(out_file), "indices": None if indices is None else str(indices),
    }  # fmt: skip
    if json:
        print_json(summary)
    else:
        _show(str(kind), classes, parts, out_file, indices)


def _labels(
    labels: Path | None, dataset: str | None, data_dir: Path | None
) -> tuple[np.ndarray, tuple[str, ...] | None, ClientIds | None]:
    """Class number of every sample, the names of the classes where they have any, and the clients likewise."""
    if (labels is None) == (dataset is None):
        raise InputError("--labels, --dataset: one of them says what to split; accepted: exactly one")
    if dataset is not None:
        from fedentopt.datasets import load

        data = load(dataset, data_dir)
        return np.asarray(data.y_train), data.class_names, data.clients
    assert labels is not None
    if data_dir is not None:
        raise InputError("--data-dir: has no meaning beside --labels; accepted: with --dataset")
    try:
        with labels.open("rb") as file:
            array = np.load(file, allow_pickle=False)
    except OSError as error:
        raise InputError(f"{labels}: {error.strerror or error}; accepted: an .npy file that can be read") from error
    except MemoryError as error:  # damaged headers announce arrays of any size
        raise InputError(f"{labels}: more labels than memory holds, or damaged; accepted: an .npy file") from error
    except (ValueError, EOFError, OverflowError, tokenize.TokenError, zipfile.BadZipFile) as error:
        # What NumPy says here speaks of pickles, which are never loaded.
        raise InputError(f"{labels}: not an array of numbers in NumPy's format; accepted: an .npy file") from error
    if not isinstance(array, np.ndarray):
        raise InputError(f"{labels}: an archive of arrays; accepted: one .npy array of class numbers")
    try:
        y = check_labels(array)
    except InputError as error:
        raise InputError(f"{labels}: {error}") from error
    if not y.size:
        raise InputError(f"{labels}: no labels; accepted: one class number per sample")
    return y, None, None


def _show(spec: str, classes: Sequence[str], parts: Partition, counts: Path | None, indices: Path | None) -> None:
    from rich.markup import escape
    from rich.table import Table

    console = out()
    sizes = parts.counts.sum(axis=1)
    held = np.count_nonzero(parts.counts, axis=1)
    console.print(
        f"{spec}: {sizes.sum():,} samples of {len(classes)} classes among {len(sizes):,} clients\n"
        f"samples per client: {sizes.min():,} to {sizes.max():,}, median {np.median(sizes):,.0f}\n"
        f"classes per client: {held.min()} to {held.max()}, mean {held.mean():.1f}"
    )
    table = Table("class", box=None, pad_edge=False)
    for heading in ("samples", "clients that hold it", "largest share of one client"):
        table.add_column(heading, justify="right")
    for name, column in zip(classes, parts.counts.T, strict=True):
        share = 100 * column.max() / max(column.sum(), 1)
        table.add_row(escape(name), f"{column.sum():,}", str(np.count_nonzero(column)), f"{share:.0f} %")
    console.print(table)
    for what, path in (("label counts", counts), ("sample numbers", indices)):
        if path is not None:
            console.print(f"{what}: {escape(str(path))}", soft_wrap=True)
