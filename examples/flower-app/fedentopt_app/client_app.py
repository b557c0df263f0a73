"""The ClientApp: answers for its labels, and trains when it is picked."""

from __future__ import annotations

import zlib

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedentopt.flower import client_id, discreet, label_report
from fedentopt_app.data import check_agreement, node_data, node_labels, number_of_classes
from fedentopt_app.settings import local_settings, run_settings

app = ClientApp(mods=[discreet])  # what goes wrong is told to the node's log, not to the server


def _number(context: Context) -> int:
    """The client's number in the keys of sample order and augmentation; a name is hashed."""
    client = client_id(context)
    return client if isinstance(client, int) else zlib.crc32(client.encode())


# What label-aware selection needs: what is counted is the owner's to say, and so is what stands for its number.
counted = label_report(node_labels, number_of_classes)
app.query("label_counts")(counted)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the global model on this node's data, as fedentopt's simulator would."""
    from fedentopt.models import build, find_head  # torch: not needed to answer for labels
    from fedentopt.simulation.local import train_client

    check_agreement(context)
    config = local_settings(run_settings(context.run_config))
    told = message.content.config_records["config"]
    images, labels = node_data(context, config.image_size)
    classes = number_of_classes(context)
    model = build(config.model, classes, seed=0, image_size=images.shape[-1])
    received = message.content["arrays"].to_torch_state_dict()
    model.load_state_dict(received)
    about = counted.about(context)
    if config.selector == "inferred":  # nobody is asked for labels, and so for the name that picks go by
        about["client-id"] = client_id(context)
    census = "census" in told  # everybody trains once before round 1, and nothing is averaged
    if census:
        about["census"] = 1
    done = train_client(
        model,
        images,
        labels,
        config=config,
        round_=0 if census else int(told["server-round"]),
        client=_number(context),
        num_classes=classes,
        mean=tuple(told["mean"]),
        std=tuple(told["std"]),
        epochs=int(told["local-epochs"]) if census else None,
    )
    # Nothing else that counts samples leaves: neither the number of steps nor BatchNorm's, which nothing reads.
    sent = model.state_dict()
    for name in [name for name in sent if name.endswith("num_batches_tracked")]:
        sent[name] = received[name]
    if census:  # only the last layer is looked at
        sent = {name: sent[name] for name in sent if name.rpartition(".")[0] == find_head(model)}
    metrics = MetricRecord({"num-examples": counted.weight(context, done.samples)})
    content = RecordDict({"arrays": ArrayRecord(sent), "metrics": metrics, "client": about})
    return Message(content, reply_to=message)
