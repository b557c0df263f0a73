"""Where the official files and their converted arrays lie."""

from __future__ import annotations

import os
from pathlib import Path

CACHE = ".fedentopt"  # inside the data folder: the converted arrays


def resolve_data_dir(data_dir: Path | str | None) -> Path:
    """The data folder: the given one, else FEDENTOPT_DATA, else the user's cache folder. It need not exist."""
    if data_dir is not None:
        return Path(data_dir).expanduser()
    if chosen := os.environ.get("FEDENTOPT_DATA"):
        return Path(chosen).expanduser()
    from platformdirs import user_cache_path

    return user_cache_path("fedentopt", appauthor=False)
