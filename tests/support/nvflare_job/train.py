"""What every site of the test's jobs runs: add the site's number to the model; one site may answer nonsense."""

import argparse
import time

import numpy as np
import nvflare.client as flare
from nvflare.app_common.app_constant import AlgorithmConstants

parser = argparse.ArgumentParser()
parser.add_argument("--seconds", type=float, default=0.0)
parser.add_argument("--liar", default="")
options = parser.parse_args()

flare.init()
site = flare.get_site_name()
number = int(site.rpartition("-")[2])
while flare.is_running():
    model = flare.receive()
    if model is None:
        break
    time.sleep(options.seconds)
    params = {name: np.asarray(value) + number for name, value in model.params.items()}
    meta = {"NUM_STEPS_CURRENT_ROUND": 25}
    controls = model.meta.get(AlgorithmConstants.SCAFFOLD_CTRL_GLOBAL)
    if controls is not None:
        meta[AlgorithmConstants.SCAFFOLD_CTRL_DIFF] = {
            name: np.full_like(value, number) for name, value in controls.items()
        }
    if site == options.liar:
        params = {name: value * np.nan for name, value in params.items()}
    flare.send(flare.FLModel(params=params, params_type="FULL", metrics={"loss": 1.0 / number}, meta=meta))
