"""The work in Flower's simulation runtime (Message API), two Ray actors of one core each."""

from __future__ import annotations

from pathlib import Path

import torch
import work
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation


def client_app(folder: Path) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        model = work.LeNet5()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        work.train_locally(model, *work.Data(folder).client(int(context.node_config["partition-id"])))
        metrics = MetricRecord({"num-examples": work.SAMPLES})
        reply = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
        return Message(reply, reply_to=message)

    return app


class TimedFedAvg(FedAvg):
    """FedAvg that notes when a round's models are averaged."""

    clock: work.Clock

    def aggregate_train(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        result = super().aggregate_train(*args, **kwargs)
        self.clock.round_ended()
        return result


def main() -> None:
    options = work.options()
    clock, final = work.Clock(), work.LeNet5()
    app = ServerApp()

    @app.main()
    def serve(grid: Grid, context: Context) -> None:
        strategy = TimedFedAvg(
            fraction_train=work.COHORT / work.CLIENTS, fraction_evaluate=0.0, min_train_nodes=work.COHORT,
            min_available_nodes=work.CLIENTS,
        )  # fmt: skip
        strategy.clock = clock
        start = ArrayRecord(final.state_dict())
        result = strategy.start(grid=grid, initial_arrays=start, num_rounds=options.rounds)
        final.load_state_dict(result.arrays.to_torch_state_dict())

    run_simulation(
        server_app=app,
        client_app=client_app(options.data),
        num_supernodes=work.CLIENTS,
        backend_config={
            "init_args": {"num_cpus": work.WORKERS, "include_dashboard": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
    clock.write(options.out, final, work.Data(options.data), ("flwr", "ray"))


if __name__ == "__main__":
    main()
