"""Softmax regression on digits of two values per node, by SGD; liars report as many of every value."""

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedentopt.datasets import load
from fedentopt.flower import client_id, label_report

LR, BATCH = 0.1, 16
app = ClientApp()


def mine(context: Context) -> tuple[np.ndarray, np.ndarray]:
    """Images as rows of numbers from 0 to 1, and labels."""
    data, number = load("digits"), int(context.node_config["partition-id"])
    held = np.flatnonzero(np.isin(data.y_train, [number % 10, (3 * number + 1) % 10]))[number % 3 :: 3]
    return data.x_train[held].reshape(len(held), -1) / 255.0, data.y_train[held]


def told(context: Context) -> np.ndarray:
    """The labels, or what a liar says."""
    labels = mine(context)[1]
    lies = str(client_id(context)) in str(context.run_config["liars"]).split(",")
    return np.arange(len(labels)) % 10 if lies else labels


app.query("label_counts")(label_report(told, 10))


@app.train()
def train(message: Message, context: Context) -> Message:
    points, labels = mine(context)
    weight, bias = (array.numpy().copy() for array in message.content["arrays"].values())
    order = np.random.default_rng(int(context.node_config["partition-id"])).permutation(len(labels))
    for first in range(0, len(order), BATCH):
        chosen = order[first : first + BATCH]
        logits = points[chosen] @ weight.T + bias
        wrong = np.exp(logits - logits.max(axis=1, keepdims=True))
        wrong /= wrong.sum(axis=1, keepdims=True)
        wrong[np.arange(len(chosen)), labels[chosen]] -= 1
        weight -= LR * wrong.T @ points[chosen] / len(chosen)
        bias -= LR * wrong.mean(axis=0)
    arrays = ArrayRecord({"fc.weight": Array(weight), "fc.bias": Array(bias)})
    content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": len(labels)})})
    return Message(content, reply_to=message)
