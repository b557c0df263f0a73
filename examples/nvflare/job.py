"""Balanced cohorts in NVIDIA FLARE: six sites, two train each round.

python job.py                     in NVFlare's simulator; prints the accuracy of the model
python job.py --to FOLDER         writes the job FOLDER/digits, to be submitted to a deployment
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np
from digits import SITES
from nvflare.recipe import SimEnv

from fedentopt.nvflare import NumpyFedEntOptRecipe

HERE = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--sites", type=int, default=SITES, help="simulated sites")
    parser.add_argument("--to", metavar="FOLDER", help="write the job instead of running it")
    parser.add_argument("--workspace", default="workspace", help="the simulator's folder")
    options = parser.parse_args()

    recipe = NumpyFedEntOptRecipe(
        name="digits",
        model=np.zeros((65, 10)).tolist(),
        num_rounds=options.rounds,
        min_clients=2,  # the job goes on for as long as two sites are alive
        cohort_size=2,
        buffer_size=2,
        num_classes=10,
        query_timeout=60,  # a site that gives no counts by then is asked again in later rounds
        train_timeout=120,  # a site that takes longer is left out of the round
        state="digits",  # submitted again after a restart of the server, the job goes on
        labels="digits:labels",
        key_metric="",  # train.py sends no accuracy by which NVFlare could keep a best model
        train_script=str(HERE / "train.py"),
    )
    recipe.add_client_file(str(HERE / "digits.py"))
    if options.to:
        recipe.export(options.to)
        return

    os.environ.setdefault("FEDENTOPT_LABEL_EPSILON", "1.0")  # simulated sites have no owner who could say it
    recipe.execute(SimEnv(num_clients=options.sites, num_threads=options.sites, workspace_root=options.workspace))

    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    weights = np.load(Path(options.workspace) / "digits" / "server" / "simulate_job" / "models" / "server.npy")
    right = (np.hstack([images / 16, np.ones((len(images), 1))]) @ weights).argmax(axis=1) == labels
    print(f"accuracy on all digits: {100 * right.mean():.1f} %")


if __name__ == "__main__":
    main()
