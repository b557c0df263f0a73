"""The test's jobs: `python jobs.py NAME SITES SETTINGS` runs one in NVFlare's simulator."""

import json
import sys
from pathlib import Path
from typing import Any

from nvflare.recipe import SimEnv
from site_labels import CLASSES

from fedentopt.nvflare import NumpyFedEntOptRecipe

HERE = Path(__file__).parent


def make(name: str, *, train_args: str = "", owner_counts: bool = False, **settings: Any) -> NumpyFedEntOptRecipe:
    """A job over the test's sites; with `owner_counts` the sites' owners say what is counted, and the job nothing."""
    recipe = NumpyFedEntOptRecipe(
        name=name,
        model=[[0.0, 0.0]],
        num_classes=CLASSES,
        min_clients=1,
        train_script=str(HERE / "train.py"),
        train_args=train_args,
        labels=None if owner_counts else "site_labels:labels",
        **settings,
    )
    recipe.add_server_config(
        {"server": {"task_request_interval": 0.2}}
    )  # else sites ask every two seconds whether there is work
    if not owner_counts:
        recipe.add_client_file(str(HERE / "site_labels.py"))
    return recipe


if __name__ == "__main__":
    name, sites, settings = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    make(name, **settings).execute(SimEnv(num_clients=sites, num_threads=sites, workspace_root="workspace"))
