"""How many clients there are, where the data says it: asked before configs are made, since a config holds a number."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedentopt.errors import InputError
from fedentopt.partition import NATURAL
from fedentopt.simulation.config import FIELDS

if TYPE_CHECKING:
    from fedentopt.datasets import Dataset


def with_own_clients(settings: Mapping[str, Any], data_dir: Path | None, data: Dataset | None = None) -> dict[str, Any]:
    """The settings with the number of clients that the data names, where they ask for natural clients and say none.

    `data` takes the place of what the settings name. Refused: data that names no clients.
    """
    if str(settings.get("partition")).strip() != NATURAL or "clients" in settings:
        return dict(settings)
    if data is None:
        from fedentopt.datasets import load

        name, size = settings.get("dataset", FIELDS["dataset"].default), settings.get("image_size")
        data = load(name, data_dir, fine_labels=settings.get("fine_labels", False), image_size=size)
    if data.clients is None:
        raise InputError(
            f"partition: natural needs data that says which client a sample belongs to, and {data.name} does not; "
            f"accepted: an .npz file with client_train, from_arrays(..., client_train=...), or folders "
            f"train/CLIENT/CLASS/* beside test/CLASS/*"
        )
    return {**settings, "clients": len(data.clients.names)}
