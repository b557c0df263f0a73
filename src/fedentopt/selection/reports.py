"""Reading the label counts that callers hand over, in whatever form they hold them.

Accepted are

* a (K, C) array, with client ids given beside it or else 0 .. K-1; of a data frame the index says them;
* a mapping from client id to a vector of C counts, to a sparse vector of them, or to a mapping {class number: count}
  of what the client holds;
* a sparse matrix of K rows: anything with `tocsr()`, or with the fields `indptr`, `indices`, `data` and `shape`
  of the compressed-row format (SciPy's are both; SciPy itself is not needed).

A class number costs its sender nothing and the server memory for every class below it, so a sparse form alone makes no
more than 2**20 classes: beyond, the server has to say `num_classes`.

Counts marked noisy are clamped at 0 here, where the server reads them. Every refusal names the client.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from types import SimpleNamespace
from typing import Any

import numpy as np

from fedentopt.errors import InputError
from fedentopt.labels import check_counts, no_samples, validate_report
from fedentopt.selection.cohort import ClientId
from fedentopt.selection.rows import Rows

_MOST_UNSAID = 1 << 20
_PLAIN = {np.ndarray, list, tuple, dict}  # vectors without names or masks
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
    if isinstance(values, (str, bytes)) or not hasattr(values, "__iter__"):
        raise InputError(f"client ids: {values!r} is one value; accepted: a list of ids")
    if isinstance(values, range):
        return list(values)
    return [client_id(value) for value in values]


def read_reports(
    counts: Any, ids: Sequence[object] | None, noisy: bool, num_classes: int | None, named: list[Any] | None = None
) -> tuple[list[ClientId], Rows, int, list[Any] | None]:
    """Client ids, their rows, the number of classes (which must be `num_classes` where that is given), and the classes
    as series or a data frame name them; `named` are those of clients that were read before, whose order is kept."""
    names: list[ClientId] | None
    if isinstance(counts, Mapping):
        if ids is not None:
            raise InputError("ids: given beside a mapping, whose keys are the ids; accepted: one of the two")
        names = client_ids(counts.keys())
        vectors = list(counts.values())
        named = _check_order(names, vectors, named)
        if any(isinstance(row, Mapping) for row in vectors):
            return names, *_read_held_classes(names, vectors, noisy, num_classes), named
        if vectors and all(hasattr(row, "tocsr") for row in vectors):
            counts = _stack_sparse(names, vectors)
        else:
            counts = _stack(names, vectors, noisy, num_classes)
        if not names:
            return [], Rows.concatenate([]), num_classes or 1, named
    elif ids is not None:
        names = client_ids(ids)
    else:
        names = _row_names(counts)
    if isinstance(counts, list | tuple):
        named = _check_order(names or range(len(counts)), counts, named)
    named = _check_columns(counts, named)
    if hasattr(counts, "tocsr"):
        counts = counts.tocsr()
    sparse = all(hasattr(counts, field) for field in ("indptr", "indices", "data", "shape"))
    table = counts if sparse else _as_table(counts)
    names = _check_shape(table.shape, names, num_classes)
    if sparse and num_classes is None and table.shape[1] > _MOST_UNSAID:
        raise InputError(
            f"counts: {table.shape[1]} classes; accepted: at most {_MOST_UNSAID} unless num_classes says so"
        )
    return names, (_read_compressed if sparse else _read_table)(table, names, noisy), int(table.shape[1]), named


def _row_names(counts: Any) -> list[ClientId] | None:
    """The clients that the rows of a data frame name; None for other tables."""
    index = getattr(counts, "index", None)
    if not hasattr(counts, "columns") or not isinstance(index, Iterable):
        return None
    try:
        return client_ids(index)
    except InputError as error:
        raise InputError(f"{error} as the index of a data frame, or ids beside it") from None


def _check_shape(shape: Sequence[int], names: list[ClientId] | None, num_classes: int | None) -> list[ClientId]:
    """Refuse a table of the wrong shape; returns the names of its rows."""
    if len(shape) != 2 or shape[1] < 1:
        raise InputError(f"counts: an array of shape {tuple(shape)}; accepted: (clients, classes)")
    if num_classes is not None and shape[1] != num_classes:
        raise InputError(f"counts: {shape[1]} classes; accepted: {num_classes}, as set or registered before")
    if names is None:
        return list(range(shape[0]))
    if len(names) != shape[0]:
        raise InputError(f"ids: {len(names)} ids for {shape[0]} rows of counts; accepted: one a row")
    seen: set[ClientId] = set()
    for name in names:
        if name in seen:
            raise InputError(f"client {name!r}: given twice; accepted: every client once")
        seen.add(name)
    return names


def _as_table(counts: Any) -> np.ndarray:
    try:
        table = np.asarray(counts)
    except ValueError as error:
        raise InputError("counts: rows of different lengths; accepted: a (clients, classes) array") from error
    except (TypeError, RuntimeError) as error:  # a tensor on a GPU, with a gradient, of a type of its own
        raise InputError(f"counts: {type(counts).__name__} cannot be read ({error}); accepted: numbers") from error
    if table.dtype.kind not in "iuf" or np.ma.is_masked(counts):
        kind = "masked values" if np.ma.is_masked(counts) else f"values of type {table.dtype}"
        raise InputError(f"counts: {kind}; accepted: numbers")
    return table


def _check_order(names: Sequence[ClientId], vectors: Sequence[Any], before: list[Any] | None) -> list[Any] | None:
    """Refuse series that name their classes in another order than the others do, and all that `check_places` does.
    Returns the classes in that order; `before` where nobody names them."""
    if {type(vector) for vector in vectors} <= _PLAIN:
        return before
    for name, vector in zip(names, vectors, strict=False):
        classes = check_places(f"client {name!r}: label counts", vector)
        if classes is not None and before is not None and classes != before:
            raise _misplaced(f"client {name!r}: label counts: a series", classes, before)
        before = classes or before
    return before


def _check_columns(counts: Any, before: list[Any] | None) -> list[Any] | None:
    """The same for the columns of a data frame; 0, 1, 2, ... are places and no names, and refused in another order."""
    columns = getattr(counts, "columns", None)
    classes = list(columns) if isinstance(columns, Iterable) else []
    named = bool(classes) and all(isinstance(one, str | Real) for one in classes)  # Arrow's are arrays
    places = list(range(len(classes)))
    if not named or classes == places:
        return before
    if set(classes) == set(places):
        raise _misplaced("counts: a data frame", classes)
    if before is not None and classes != before:
        raise _misplaced("counts: a data frame", classes, before)
    return classes


def check_places(name: str, vector: Any) -> list[Any] | None:
    """The classes that a pandas Series names; None for other vectors, and for 0, 1, 2, ..., which are places and no
    names. A vector is read by place, and `value_counts()` puts the commonest class first and leaves out what is not
    there: class numbers that are no places are refused. Masked values are, too: what lies behind the mask would be
    read."""
    if np.ma.is_masked(vector):
        raise InputError(f"{name}: masked values; accepted: numbers")
    index = getattr(vector, "index", None)
    if not isinstance(index, Iterable):  # a list's method, or something else of that name
        return None
    classes = list(index)
    moved = classes != list(range(len(classes)))
    if moved and all(isinstance(one, Real) and float(one).is_integer() for one in classes):
        raise _misplaced(f"{name}: a series", classes)
    return classes if moved else None


def _misplaced(what: str, classes: list[Any], before: list[Any] | None = None) -> InputError:
    order = "0, 1, 2, ... where they are numbers" if before is None else f"{_shown(before)}, as named before"
    return InputError(
        f"{what} of the classes {_shown(classes)}; accepted: all classes in the same order ({order}); "
        "for label counts also {class number: count}, as Series.to_dict() gives it"
    )


def _shown(classes: list[Any]) -> str:
    return ", ".join(map(str, classes[:5])) + (", ..." if len(classes) > 5 else "")


def _stack(names: Sequence[ClientId], vectors: list[Any], noisy: bool, num_classes: int | None) -> np.ndarray:
    """One table from a vector a client."""
    try:
        table = np.asarray(vectors)
    except (ValueError, TypeError, RuntimeError):
        table = np.zeros(0)
    if table.ndim == 2 and table.dtype.kind in "iuf" and num_classes in (None, table.shape[1]):
        return table
    # Something is wrong with some row: go row by row, so that the refusal names the client.
    size = _length(vectors[0]) if vectors and num_classes is None else num_classes or 1
    checked = [validate_report(name, row, size, noisy) for name, row in zip(names, vectors, strict=True)]
    return np.stack(checked) if checked else np.zeros((0, size))


def _length(vector: Any) -> int:
    """Entries of what may be a vector; 1 where it cannot be read, which `validate_report` then refuses."""
    try:
        return int(np.asarray(vector, dtype=object).size)
    except (ValueError, TypeError, RuntimeError):
        return 1


def _stack_sparse(names: Sequence[ClientId], vectors: list[Any]) -> SimpleNamespace:
    """One compressed table from a sparse vector, or sparse matrix of one row, a client."""
    rows = [vector.tocsr() for vector in vectors]
    classes = rows[0].shape[-1]
    for name, row in zip(names, rows, strict=True):
        if tuple(row.shape) not in ((classes,), (1, classes)):
            raise InputError(f"client {name!r}: sparse label counts of shape {row.shape}; accepted: (1, {classes})")
    return SimpleNamespace(
        indptr=np.cumsum([0, *(row.data.size for row in rows)]),
        indices=np.concatenate([row.indices for row in rows]),
        data=np.concatenate([row.data for row in rows]),
        shape=(len(rows), classes),
    )


def _read_table(table: np.ndarray, names: Sequence[ClientId], noisy: bool) -> Rows:
    step = max(1, _CHUNK_CELLS // table.shape[1])
    blocks = []
    for start in range(0, len(names), step):
        piece = table[start : start + step]
        held = piece != 0  # NaN too, so that it meets the check
        raw = Rows.from_lengths(held.sum(axis=1), np.nonzero(held)[1].astype(np.int32), piece[held].astype(np.float64))
        blocks.append(_checked(raw, names[start : start + step], noisy))
    return Rows.concatenate(blocks)


def _read_held_classes(
    names: Sequence[ClientId], rows: Iterable[Any], noisy: bool, num_classes: int | None
) -> tuple[Rows, int]:
    """Rows given as {class number: count}, possibly with plain vectors among them."""
    classes: list[int] = []
    values: list[np.ndarray] = []
    most = num_classes or _MOST_UNSAID
    hint = "as set or registered before" if num_classes else "unless num_classes says how many there are"
    for name, row in zip(names, rows, strict=True):
        if isinstance(row, Mapping):
            held = row
        else:
            size = _length(row) if num_classes is None else num_classes
            held = dict(enumerate(validate_report(name, row, size, noisy).tolist()))
        for number in held:
            if isinstance(number, bool) or not isinstance(number, (int, np.integer)) or number < 0:
                raise InputError(f"client {name!r}: class {number!r}; accepted: whole class numbers from 0")
            if number >= most:
                raise InputError(f"client {name!r}: class {number}; accepted: 0 to {most - 1}, {hint}")
        try:
            counts = np.asarray(list(held.values()))
        except (ValueError, TypeError, RuntimeError) as error:
            raise InputError(f"client {name!r}: label counts {held!r}; accepted: a number per class") from error
        if counts.size and (counts.dtype.kind not in "iuf" or counts.ndim != 1):
            raise InputError(f"client {name!r}: label counts of type {counts.dtype}; accepted: numbers")
        classes.extend(held)
        values.append(counts.astype(np.float64))
    raw = Rows.from_lengths(
        np.array([row.size for row in values]), np.array(classes, dtype=np.int32), np.concatenate(values)
    )
    return _checked(raw, names, noisy), num_classes or max(classes, default=0) + 1


def _read_compressed(matrix: Any, names: Sequence[ClientId], noisy: bool) -> Rows:
    indptr, classes, data = np.asarray(matrix.indptr), np.asarray(matrix.indices), np.asarray(matrix.data)
    if indptr.shape != (len(names) + 1,) or indptr[0] != 0 or (np.diff(indptr) < 0).any():
        raise InputError("counts: the row pointers of the sparse matrix do not fit its shape")
    if classes.shape != data.shape or indptr[-1] > data.size or data.dtype.kind not in "iuf":
        raise InputError("counts: the entries of the sparse matrix are not one number for each class index")
    raw = Rows(indptr.astype(np.int64), classes[: indptr[-1]], data[: indptr[-1]].astype(np.float64))
    outside = (raw.classes < 0) | (raw.classes >= matrix.shape[1])
    if outside.any():
        at = int(np.argmax(outside))
        raise InputError(
            f"client {names[raw.owner(at)]!r}: class {raw.classes[at]}; accepted: 0 to {matrix.shape[1] - 1}"
        )
    twice = raw.repeated_class()
    if twice is not None:
        raise InputError(f"client {names[twice]!r}: a class is given twice; accepted: every class once a row")
    return _checked(raw, names, noisy)


def _checked(raw: Rows, names: Sequence[ClientId], noisy: bool) -> Rows:
    """Rows as given, with any value in them, as rows of counts: only what is above 0."""
    check_counts(raw.values, noisy, lambda at: f"client {names[raw.owner(at)]!r}: the count of class {raw.classes[at]}")
    held = raw.values > 0
    rows = raw if held.all() else raw.filter(held)
    lengths = np.diff(rows.indptr)
    if not noisy and lengths.size and lengths.min() == 0:
        raise no_samples(f"client {names[int(np.argmin(lengths))]!r}")
    return Rows(rows.indptr, rows.classes.astype(np.int32, copy=False), rows.values)
