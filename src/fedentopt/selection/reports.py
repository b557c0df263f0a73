"""Reading the label counts that callers hand over, in whatever form they hold them.

Accepted are

* a (K, C) array, with client ids given beside it or else 0 .. K-1;
* a mapping from client id to a vector of C counts, or to a mapping {class number: count} of what the client holds;
* a sparse matrix of K rows: anything with `tocsr()`, or with the fields `indptr`, `indices`, `data` and `shape`
  of the compressed-row format (SciPy's are both; SciPy itself is not needed).

Counts marked noisy are clamped at 0 here, where the server reads them. Every refusal names the client.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fedentopt.errors import InputError
from fedentopt.labels import check_values, validate_report
from fedentopt.selection.cohort import ClientId
from fedentopt.selection.rows import Rows

_CHUNK_CELLS = 1 << 22  # a dense table is read in pieces, so that reading needs little memory of its own


def client_id(value: object) -> ClientId:
    """A client id as plain str or int; anything else is refused."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return int(value)
    raise InputError(f"client id: {value!r} is a {type(value).__name__}; accepted: text or a whole number")


def client_ids(values: Iterable[object]) -> list[ClientId]:
    """Client ids as plain str or int."""
    if isinstance(values, (str, bytes)):
        raise InputError(f"client ids: {values!r} is one text; accepted: a list of ids")
    if isinstance(values, range):
        return list(values)
    return [client_id(value) for value in values]


def read_reports(
    counts: Any, ids: Sequence[object] | None, noisy: bool, num_classes: int | None
) -> tuple[list[ClientId], Rows, int]:
    """Client ids, their rows, and the number of classes (which must be `num_classes` where that is given)."""
    if isinstance(counts, Mapping):
        if ids is not None:
            raise InputError("ids: given beside a mapping, whose keys are the ids; accepted: one of the two")
        names = client_ids(counts.keys())
        rows, classes = _read_mapping(names, list(counts.values()), noisy, num_classes)
    else:
        sparse = hasattr(counts, "tocsr") or all(hasattr(counts, f) for f in ("indptr", "indices", "data", "shape"))
        table = counts if sparse else _as_table(counts)
        shape = table.shape
        if len(shape) != 2:
            raise InputError(f"counts: an array of shape {tuple(shape)}; accepted: (clients, classes)")
        names = list(range(shape[0])) if ids is None else client_ids(ids)
        if len(names) != shape[0]:
            raise InputError(f"ids: {len(names)} ids for {shape[0]} rows of counts; accepted: one a row")
        classes = int(shape[1])
        _check_classes(classes, num_classes)
        rows = _read_sparse(counts, names, noisy) if sparse else _read_table(table, names, noisy)
    if len(set(names)) != len(names):
        seen: set[ClientId] = set()
        twice = next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise InputError(f"client {twice!r}: given twice; accepted: every client once")
    return names, rows, classes


def _check_classes(given: int, expected: int | None) -> None:
    if given < 1:
        raise InputError("counts: no classes; accepted: at least one column")
    if expected is not None and given != expected:
        raise InputError(f"counts: {given} classes; accepted: {expected}, as for the clients already registered")


def _as_table(counts: Any) -> np.ndarray:
    try:
        table = np.asarray(counts)
    except ValueError as error:
        raise InputError("counts: rows of different lengths; accepted: a (clients, classes) array") from error
    if table.dtype.kind not in "iuf":
        raise InputError(f"counts: values of type {table.dtype}; accepted: numbers")
    return table


def _read_table(table: np.ndarray, names: Sequence[ClientId], noisy: bool) -> Rows:
    step = max(1, _CHUNK_CELLS // table.shape[1])
    blocks = []
    for start in range(0, table.shape[0], step):
        piece = table[start : start + step].astype(np.float64)
        check_values(piece, names[start : start + step], noisy)
        held = piece > 0
        blocks.append(Rows.from_lengths(held.sum(axis=1), np.nonzero(held)[1].astype(np.int32), piece[held]))
    return Rows.concatenate(blocks)


def _read_mapping(
    names: Sequence[ClientId], vectors: list[Any], noisy: bool, num_classes: int | None
) -> tuple[Rows, int]:
    if any(isinstance(vector, Mapping) for vector in vectors):
        return _read_sparse_mapping(names, vectors, noisy, num_classes)
    if not vectors:
        return Rows.concatenate([]), num_classes or 1
    if num_classes is None:
        num_classes = np.asarray(vectors[0]).size
        _check_classes(num_classes, None)
    try:
        table = np.asarray(vectors)
    except ValueError:
        table = np.zeros(0)
    if table.ndim != 2 or table.dtype.kind not in "iuf" or table.shape[1] != num_classes:
        # Row by row, so that the refusal names the client.
        table = np.stack(
            [validate_report(name, row, num_classes, noisy) for name, row in zip(names, vectors, strict=True)]
        )
    return _read_table(table, names, noisy), num_classes


def _read_sparse_mapping(
    names: Sequence[ClientId], vectors: list[Any], noisy: bool, num_classes: int | None
) -> tuple[Rows, int]:
    lengths = np.zeros(len(names), dtype=np.int64)
    classes: list[np.ndarray] = []
    values: list[np.ndarray] = []
    for i, (name, vector) in enumerate(zip(names, vectors, strict=True)):
        if isinstance(vector, Mapping):
            held = np.array([_class_number(name, c) for c in vector], dtype=np.int64)
            raw = np.asarray(list(vector.values()))
            if raw.size and (raw.dtype.kind not in "iuf" or raw.ndim != 1):
                raise InputError(f"client {name!r}: label counts of type {raw.dtype}; accepted: numbers")
            entries = raw.astype(np.float64)
        else:
            entries = validate_report(name, vector, num_classes or np.asarray(vector).size, noisy)
            held = np.arange(entries.size)
        _check_entries(name, held, entries, noisy)
        keep = entries > 0
        lengths[i] = np.count_nonzero(keep)
        classes.append(held[keep])
        values.append(entries[keep])
        if num_classes is not None and held.size and held.max() >= num_classes:
            raise InputError(
                f"client {name!r}: class {held.max()}; accepted: 0 to {num_classes - 1} (num_classes sets their number)"
            )
    rows = Rows.from_lengths(lengths, np.concatenate(classes).astype(np.int32), np.concatenate(values))
    if num_classes is None:
        num_classes = int(rows.classes.max()) + 1 if rows.classes.size else 1
    return rows, num_classes


def _class_number(name: ClientId, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 0 <= value < 2**31:
        raise InputError(f"client {name!r}: class {value!r}; accepted: whole class numbers from 0")
    return int(value)


def _check_entries(name: ClientId, held: np.ndarray, entries: np.ndarray, noisy: bool) -> None:
    if not entries.size and not noisy:
        raise InputError(f"client {name!r}: no label counts at all; accepted: at least one sample")
    try:
        check_values(entries[None, :], [name], noisy)
    except InputError as error:
        # The position in the row is not the class number here: say it again with the class.
        bad = ~np.isfinite(entries) | (np.abs(entries) > 2.0**53) | (entries < 0)
        if not bad.any():
            raise
        at = int(np.argmax(bad))
        raise InputError(
            f"client {name!r}: the count of class {held[at]} is {entries[at]:g}; accepted: finite numbers, 0 or more unless noisy"
        ) from error


def _read_sparse(matrix: Any, names: Sequence[ClientId], noisy: bool) -> Rows:
    csr = matrix.tocsr() if hasattr(matrix, "tocsr") else matrix
    indptr = np.asarray(csr.indptr, dtype=np.int64)
    classes, data = np.asarray(csr.indices), np.asarray(csr.data)
    if (
        indptr.shape != (len(names) + 1,)
        or indptr[0] != 0
        or (np.diff(indptr) < 0).any()
        or indptr[-1] > min(classes.size, data.size)
    ):
        raise InputError(
            "counts: the row pointers of the sparse matrix do not fit its shape; accepted: compressed rows"
        )
    if data.dtype.kind not in "iuf":
        raise InputError(f"counts: values of type {data.dtype}; accepted: numbers")
    classes, data = classes[: indptr[-1]], data[: indptr[-1]].astype(np.float64)
    rows = Rows(indptr, classes, data)
    owners = rows.owners()
    outside = (classes < 0) | (classes >= csr.shape[1])
    if outside.any():
        at = int(np.argmax(outside))
        raise InputError(f"client {names[owners[at]]!r}: class {classes[at]}; accepted: 0 to {csr.shape[1] - 1}")
    bad = ~np.isfinite(data) | (np.abs(data) > 2.0**53)
    if not noisy:
        bad |= data < 0
    if bad.any():
        at = int(np.argmax(bad))
        raise InputError(
            f"client {names[owners[at]]!r}: the count of class {classes[at]} is {data[at]:g}; accepted: finite numbers, 0 or more unless noisy"
        )
    order = np.lexsort((classes, owners))
    if ((np.diff(owners[order]) == 0) & (np.diff(classes[order]) == 0)).any():
        at = int(np.argmax((np.diff(owners[order]) == 0) & (np.diff(classes[order]) == 0)))
        raise InputError(
            f"client {names[owners[order][at]]!r}: class {classes[order][at]} is given twice; accepted: every class once a row"
        )
    keep = data > 0
    lengths = np.bincount(owners[keep], minlength=len(names))
    if not noisy and (lengths == 0).any():
        raise InputError(
            f"client {names[int(np.argmin(lengths))]!r}: all label counts are 0; accepted: at least one sample (only counts marked noisy may be all zero)"
        )
    return Rows.from_lengths(lengths, classes[keep].astype(np.int32), data[keep])
