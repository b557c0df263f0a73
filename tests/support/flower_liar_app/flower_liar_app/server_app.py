"""The strategy that the run config describes; whom it suspects goes into a file."""

import json
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from fedentopt.datasets import load
from fedentopt.flower import strategy_from

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    features = load("digits").x_train[0].size
    start = {"fc.weight": np.zeros((10, features)), "fc.bias": np.zeros(10)}
    strategy = strategy_from(context.run_config, fraction_evaluate=0.0)
    strategy.start(
        grid, ArrayRecord({name: Array(array) for name, array in start.items()}), int(context.run_config["rounds"])
    )
    found = {str(client): str(why) for client, why in strategy.suspects().items()}
    Path(str(context.run_config["out"])).write_text(json.dumps(found))
