"""Data that knows its clients: an id per training sample, as in `client_train` of an .npz file or in folder names.

Ids are whole numbers or text; the distinct ones in ascending order are the clients, numbered from 0. Nothing happens
to them unless the partition `natural` is asked for: data alone never changes what a setting means.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedentopt.errors import InputError


@dataclass(frozen=True)
class ClientIds:
    """Who holds which training sample: `numbers` int64 (n,), places in `names`; every client has a sample."""

    names: tuple[str, ...]
    numbers: np.ndarray


def client_ids(where: str, ids: np.ndarray, samples: int) -> ClientIds:
    """Clients from an id per sample; refused: more or fewer ids, other types, blank text, null
    characters, fewer than two clients."""
    if ids.dtype.kind not in "iuU" or ids.ndim != 1:
        raise InputError(
            f"{where} of shape {ids.shape} and type {ids.dtype}; accepted: whole numbers or text of shape (n,), "
            f"one client id per training sample"
        )
    if len(ids) != samples:
        raise InputError(f"{where}: {len(ids)} client ids for {samples} training samples; accepted: one for each")
    found, numbers = np.unique(ids, return_inverse=True)
    try:
        names = tuple(str(name) for name in found)
        for name in names:
            name.encode()
    except (UnicodeEncodeError, SystemError, ValueError) as error:
        raise InputError(f"{where}: a client id is not text ({error}); accepted: text in UTF-8") from error
    for name in names:
        if not name.strip() or "\0" in name:  # which no reader of CSV files takes
            at = int(np.flatnonzero(numbers == names.index(name))[0])
            wrong = "has a null character" if "\0" in name else "is blank"
            raise InputError(f"{where}[{at}]: the client id {name!r} {wrong}; accepted: a name for every client")
    if len(names) < 2:
        raise InputError(f"{where}: one client only ({', '.join(names)}); accepted: two or more")
    return ClientIds(names, numbers.reshape(-1).astype(np.int64))
