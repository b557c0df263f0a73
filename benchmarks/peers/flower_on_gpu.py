"""pfl-research's CIFAR-10 workload in Flower's simulation runtime (Message API): Ray actors that share one GPU.

Ten actors of one core and a tenth of the GPU, as pfl-research's own comparison gives Flower. Every actor keeps all
training images on the GPU, which favours Flower over that comparison, where a client reads its images from disk.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import cifar10_work as work
import torch
from torch.nn import functional as F


@lru_cache(maxsize=1)  # per actor: Flower unpickles the app for every message, but imports this module once
def training(folder: Path, seed: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.nn.Module]:
    """All training images and labels, the users' samples, and a net to train in."""
    torch.set_num_threads(1)
    work.same_products()
    images = work.Images(folder, seed)
    return *images.split("train", device), torch.from_numpy(images.users).to(device), work.simple_cnn().to(device)


def train_locally(folder: Path, seed: int, device: str, user: int, state: dict[str, torch.Tensor]) -> None:
    """One user's epoch, from the server's model; the trained one is left in `state`."""
    x, y, users, model = training(folder, seed, device)
    model.load_state_dict(state)
    model.train()
    sgd = torch.optim.SGD(model.parameters(), lr=work.LR)
    for _ in range(work.EPOCHS):
        for chosen in users[user].split(work.BATCH):
            sgd.zero_grad()
            F.cross_entropy(model(x[chosen]), y[chosen]).backward()
            sgd.step()
    state.update({name: value.cpu() for name, value in model.state_dict().items()})


def main() -> None:
    from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    options = work.options()
    progress = work.Progress(options.progress)
    folder, seed, device = options.data.resolve(), options.seed, options.device
    torch.manual_seed(seed)
    client, server = ClientApp(), ServerApp()

    @client.train()
    def train(message: Message, context: Context) -> Message:
        import flower_on_gpu  # by name, so that an actor keeps its images from one message to the next

        state = message.content["arrays"].to_torch_state_dict()
        flower_on_gpu.train_locally(folder, seed, device, int(context.node_config["partition-id"]), state)
        reply = {"arrays": ArrayRecord(state), "metrics": MetricRecord({"num-examples": work.IMAGES})}
        return Message(RecordDict(reply), reply_to=message)

    class TimedFedAvg(FedAvg):
        """FedAvg that says when training begins: when the first cohort is sent out."""

        def configure_train(self, server_round: int, *args, **kwargs):  # type: ignore[no-untyped-def]
            if server_round == 1:
                progress.say(ready=True, parameters=parameters, processes=options.actors, device=device)
            return super().configure_train(server_round, *args, **kwargs)

    net = work.simple_cnn().to(device)
    parameters = sum(p.numel() for p in net.parameters())

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        x, y = work.Images(folder, seed).split("test", device)

        def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord | None:
            if number and (number % work.EVALUATE_EVERY == 0 or number == options.rounds):
                net.load_state_dict(arrays.to_torch_state_dict())
                progress.round_ended(number, work.accuracy(net, x, y))
            elif number:
                progress.round_ended(number)
            return None

        strategy = TimedFedAvg(
            fraction_train=work.COHORT / work.USERS, fraction_evaluate=0.0, min_train_nodes=work.COHORT,
            min_available_nodes=work.USERS,
        )  # fmt: skip
        start = ArrayRecord({name: value.cpu() for name, value in net.state_dict().items()})
        strategy.start(
            grid=grid, initial_arrays=start, num_rounds=options.rounds, train_config=ConfigRecord(),
            evaluate_fn=evaluate,
        )  # fmt: skip
        progress.say(done=True)

    on_gpu = device == "cuda"
    run_simulation(
        server_app=server,
        client_app=client,
        num_supernodes=work.USERS,
        backend_config={
            "init_args": {"num_cpus": options.actors, "num_gpus": int(on_gpu), "include_dashboard": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 1 / options.actors if on_gpu else 0.0},
        },
    )


if __name__ == "__main__":
    main()
