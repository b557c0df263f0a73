"""The work in pfl (pfl-research), two processes that torchrun starts."""

from __future__ import annotations

import functools

import numpy as np
import torch
import work
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.internal.ops.selector import get_framework_module
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel


class Net(work.LeNet5):
    """LeNet-5 with the two methods that pfl asks a module for."""

    def loss(self, x: torch.Tensor, y: torch.Tensor, eval: bool = False) -> torch.Tensor:
        self.train(not eval)
        return torch.nn.functional.cross_entropy(self(x), y)

    def metrics(self, x: torch.Tensor, y: torch.Tensor, eval: bool = True) -> dict[str, Weighted]:
        with torch.no_grad():
            return {"loss": Weighted(float(self.loss(x, y, eval)) * len(x), len(x))}


class Ends(TrainingProcessCallback):
    """Notes when a central iteration has ended."""

    def __init__(self, clock: work.Clock) -> None:
        self.clock = clock

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):  # type: ignore[no-untyped-def]
        self.clock.round_ended()
        return False, Metrics()


def main() -> None:
    options = work.options()
    torch.set_num_threads(1)
    np.random.seed(0)  # noqa: NPY002 - pfl draws from the global generator, and all processes must draw alike
    torch.manual_seed(0)  # and begin with the same net
    data, clock, net = work.Data(options.data), work.Clock(), Net()
    users = [list(data.client(k)) for k in range(work.CLIENTS)]
    federated = FederatedDataset.from_slices(users, get_user_sampler("random", range(work.CLIENTS)))
    model = PyTorchModel(
        model=net,
        local_optimizer_create=functools.partial(
            torch.optim.SGD, momentum=work.MOMENTUM, weight_decay=work.WEIGHT_DECAY
        ),
        central_optimizer=torch.optim.SGD(net.parameters(), 1.0),
    )
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=options.rounds, evaluation_frequency=options.rounds + 1,
            train_cohort_size=work.COHORT, val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=federated, val_data=federated, postprocessors=[WeightByDatapoints()]),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_learning_rate=work.LR, local_num_epochs=work.EPOCHS, local_batch_size=work.BATCH
        ),
        callbacks=[Ends(clock)],
    )  # fmt: skip
    distributed = get_framework_module().distributed
    assert distributed.world_size == work.WORKERS, distributed.world_size
    if distributed.global_rank == 0:
        clock.write(options.out, net, data, ("pfl",))


if __name__ == "__main__":
    main()
