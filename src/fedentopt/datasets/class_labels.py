"""Labels in the forms people keep them in, as classes 0..C-1 with names: whole numbers, text, one-hot rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedentopt.datasets.source import ArraySource
from fedentopt.errors import InputError


def read_labels(found: ArraySource, images: ArraySource) -> np.ndarray:
    """Labels as int64 (n,), as text (n,), or as one-hot rows, bool (n, C); refused unless there is one per image."""
    shape = found.shape
    column = len(shape) == 1 or (len(shape) == 2 and shape[1] == 1)
    rows = len(shape) == 2 and shape[1] > 1 and found.dtype.kind in "biuf"
    if not rows and not (column and found.dtype.kind in "iuUS"):
        accepted = "whole numbers or text of shape (n,), one label per image, or one-hot rows"
        raise InputError(f"{found}; accepted: {accepted}")
    if shape[0] != images.shape[0]:
        raise InputError(f"{found}; accepted: {images.shape[0]} labels, as many as {images.key} has images")
    try:
        values = found.read()
        if found.dtype.kind == "S":
            values = np.char.decode(values, "utf-8")
    except (SystemError, ValueError) as error:  # characters that are none
        raise InputError(f"{found}: not text ({error}); accepted: text in UTF-8") from error
    if rows:
        return _one_hot(found, values)
    values = values.reshape(-1)
    if values.dtype.kind == "U":
        return values
    if values.size and int(values.max()) > np.iinfo(np.int64).max:
        raise InputError(f"{found}: {values.max()} is too large a label")
    return values.astype(np.int64)


def _one_hot(found: ArraySource, values: np.ndarray) -> np.ndarray:
    chosen: np.ndarray = values == 1
    wrong = ~((chosen | (values == 0)).all(1) & (chosen.sum(1) == 1))
    if wrong.any():
        at = int(np.argmax(wrong))
        raise InputError(f"{found}: row {at} is not one-hot; accepted: one 1 per row and 0 elsewhere, or numbers (n,)")
    return chosen


def label_classes(
    where: str, train: np.ndarray, test: np.ndarray, given: Sequence[str] | None
) -> tuple[tuple[str, ...], tuple[np.ndarray, np.ndarray], tuple[str, ...]]:
    """Names of the classes, labels 0..C-1 of both splits, and notes on classes without images.

    `train` and `test` are as `read_labels` gives them. With names `given`, numbers are their places and text is one of
    them; without, the distinct labels in ascending order are the classes, or the columns of one-hot rows.
    """
    train, test, given = _numbered(where, train, test, given)
    if given is not None:
        names = tuple(given)
        check_names(where, names)
        if len(set(names)) < len(names):
            raise InputError(f"{where}: class_names holds a name twice; accepted: distinct names")
        for key, labels in (("y_train", train), ("y_test", test)):
            check_range(where, key, labels, len(names))
    else:
        distinct = np.unique(np.concatenate([train, test]))
        names = tuple(str(label) for label in distinct)
        train, test = np.searchsorted(distinct, train), np.searchsorted(distinct, test)
    if len(names) < 2:
        raise InputError(f"{where}: y_train holds one class only ({', '.join(names)}); accepted: two or more")
    return names, (train.astype(np.int64), test.astype(np.int64)), absent(where, names, train, test)


def _numbered(
    where: str, train: np.ndarray, test: np.ndarray, given: Sequence[str] | None
) -> tuple[np.ndarray, np.ndarray, Sequence[str] | None]:
    """One-hot rows and text as numbers, with the names of their classes; numbers as they are."""
    kinds = {_kind(labels) for labels in (train, test)}
    if len(kinds) > 1:
        raise InputError(f"{where}: y_train holds {_kind(train)}, y_test {_kind(test)}; accepted: the same in both")
    if train.ndim == 2:
        width = train.shape[1]
        if test.shape[1] != width or (given is not None and len(given) != width):
            also = "" if given is None else f", class_names names {len(given)}"
            raise InputError(
                f"{where}: one-hot rows of {width} classes in y_train, of {test.shape[1]} in y_test{also}; "
                "accepted: as many everywhere"
            )
        return train.argmax(1), test.argmax(1), given or tuple(str(i) for i in range(width))
    if train.dtype.kind != "U":
        return train, test, given
    names = np.unique(np.concatenate([train, test])) if given is None else np.array(given)
    order = np.argsort(names)
    numbers = []
    for key, labels in (("y_train", train), ("y_test", test)):
        places = np.searchsorted(names, labels, sorter=order).clip(max=len(names) - 1)
        found = order[places]
        wrong = names[found] != labels
        if wrong.any():
            at = int(np.argmax(wrong))
            raise InputError(f"{where}: {key}[{at}] is {str(labels[at])!r}; accepted: {', '.join(names)}")
        numbers.append(found)
    return numbers[0], numbers[1], [str(name) for name in names]


def _kind(labels: np.ndarray) -> str:
    return "one-hot rows" if labels.ndim == 2 else "text" if labels.dtype.kind == "U" else "whole numbers"


def check_names(where: str, names: Sequence[str]) -> None:
    """Refuse names of classes that no table can hold: blank ones, and those that are not Unicode text."""
    for name in names:
        if not name.strip() or not is_text(name):
            raise InputError(f"{where}: the class name {name!r} cannot be written to a table; accepted: text in UTF-8")


def is_text(name: str) -> bool:
    """Whether a name, such as that of a file with stray bytes in it, can be written as UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def absent(where: str, names: tuple[str, ...], train: np.ndarray, test: np.ndarray) -> tuple[str, ...]:
    """Notes on classes without a single image in one of the splits."""
    notes = []
    for split, labels in (("training", train), ("test", test)):
        without = [names[i] for i in np.flatnonzero(np.bincount(labels, minlength=len(names)) == 0)]
        if without:
            notes.append(f"{where}: no {split} images of {', '.join(without)}")
    return tuple(notes)


def check_range(path: Path | str, key: str, labels: np.ndarray, classes: int) -> None:
    """Refuse a label outside 0..classes-1, by its place."""
    wrong = (labels < 0) | (labels >= classes)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise InputError(f"{path}: {key}[{at}] is {labels[at]}; accepted: 0 to {classes - 1}")
