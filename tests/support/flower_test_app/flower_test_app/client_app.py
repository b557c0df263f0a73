"""Reports labels from the node's own file; "trains" by adding one, in held rounds once the test lets it go on."""

import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedentopt.flower import client_id, label_report

app = ClientApp()


def trace(context: Context, what: str) -> None:
    """Leave an empty file that the test can wait for."""
    (Path(str(context.run_config["traces"])) / what).touch()


def hold(context: Context, until: str) -> None:
    """Wait for a file of the test's, two minutes at most."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (Path(str(context.run_config["traces"])) / until).exists():
        time.sleep(0.1)


def labels(context: Context) -> np.ndarray:
    with np.load(str(context.node_config["data"])) as data:
        return data["y_train"]


report = label_report(labels, 10)


@app.query("label_counts")
def query(message: Message, context: Context) -> Message:
    trace(context, f"asked-{client_id(context)}")
    return report(message, context)


@app.train()
def train(message: Message, context: Context) -> Message:
    server_round = int(message.content["config"]["server-round"])
    trace(context, f"training-{client_id(context)}-{server_round}")
    if str(server_round) in str(context.run_config["held-rounds"]).split(","):
        hold(context, f"go-on-{server_round}")
    arrays = ArrayRecord({name: Array(array.numpy() + 1) for name, array in message.content["arrays"].items()})
    return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})}), reply_to=message)
