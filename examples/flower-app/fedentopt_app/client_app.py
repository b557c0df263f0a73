"""The ClientApp: answers for its labels, and trains when it is picked."""

from __future__ import annotations

import zlib

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedentopt.flower import client_id, label_report
from fedentopt_app.data import node_data, node_labels, number_of_classes
from fedentopt_app.settings import local_settings, run_settings

app = ClientApp()


def _number(context: Context) -> int:
    """The client's number in the keys of sample order and augmentation; a name is hashed."""
    client = client_id(context)
    return client if isinstance(client, int) else zlib.crc32(client.encode())


# The one line that label-aware selection needs.
app.query("label_counts")(label_report(node_labels, number_of_classes))


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the global model on this node's data, as fedentopt's simulator would."""
    from fedentopt.models import build  # torch: not needed to answer for labels
    from fedentopt.simulation.local import train_client

    config = local_settings(run_settings(context.run_config))
    told = message.content.config_records["config"]
    images, labels = node_data(context)
    classes = number_of_classes(context)
    model = build(config.model, classes, seed=0, image_size=images.shape[-1])
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    done = train_client(
        model,
        images,
        labels,
        config=config,
        round_=int(told["server-round"]),
        client=_number(context),
        num_classes=classes,
        mean=tuple(told["mean"]),
        std=tuple(told["std"]),
    )
    metrics = MetricRecord({"num-examples": done.samples, "steps": done.steps})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)
