"""pfl-research's CIFAR-10 workload in pfl itself: FederatedAveraging, SimulatedBackend, PyTorchModel, its own samplers.

As in its published script, all training images lie on the GPU and a user is a slice of them. Two things favour pfl over
that script: the test images lie there too (the script copies them from main memory at every evaluation), and matrix
products may use TF32. With PFL_WORKER_ADDRESSES and PFL_WORKER_RANK set, this is one process of several.
"""

from __future__ import annotations

import os
import types

import cifar10_work as work
import numpy as np
import torch
from torch import nn


def let_processes_share_the_gpu() -> None:
    """pfl asks for NCCL wherever there is CUDA: gloo instead, where NCCL did not join processes on one GPU.

    In place before pfl is imported, which is when it joins its processes.
    """
    join = torch.distributed.init_process_group

    def joined(backend: str | None = None, **kwargs: object) -> None:
        print(f"shim: processes joined by gloo instead of {backend}, so that they can share a GPU", flush=True)
        join(backend="gloo", **kwargs)

    torch.distributed.init_process_group = joined


class Transpose2D(nn.Module):
    """pfl's users hold images as (n, height, width, channels); its CNN begins with this."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.permute((0, 3, 1, 2))


def pfl_model() -> nn.Module:
    """The CNN with the two methods that pfl asks a module for."""
    from pfl.metrics import Weighted

    def loss(self: nn.Module, x: torch.Tensor, y: torch.Tensor, eval: bool = False) -> torch.Tensor:
        self.train(not eval)
        return nn.functional.cross_entropy(self(x), y.long())

    @torch.no_grad()
    def metrics(self: nn.Module, x: torch.Tensor, y: torch.Tensor, eval: bool = True) -> dict[str, Weighted]:
        self.train(not eval)
        logits, labels = self(x), y.long()
        right = float((logits.argmax(-1) == labels).sum())
        total = float(nn.functional.cross_entropy(logits, labels, reduction="sum"))
        return {"loss": Weighted(total, len(x)), "accuracy": Weighted(right, len(x))}

    model = work.simple_cnn(work.CLASSES, Transpose2D())
    model.loss, model.metrics = types.MethodType(loss, model), types.MethodType(metrics, model)  # type: ignore[assignment]
    return model


def main() -> None:
    options = work.options()
    os.environ["PFL_PYTORCH_DEVICE"] = options.device
    torch.set_num_threads(1)
    work.same_products()
    if options.gloo:
        let_processes_share_the_gpu()

    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByUser
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.callback.central_evaluation import CentralEvaluationCallback
    from pfl.data import FederatedDataset
    from pfl.data.dataset import Dataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.internal.ops.pytorch_ops import distributed, to_tensor
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    first = distributed.global_rank == 0
    progress = work.Progress(options.progress) if first else None

    class Ends(TrainingProcessCallback):
        """Notes every round's end, and what CentralEvaluationCallback found in it."""

        def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):  # type: ignore[no-untyped-def]
            if progress is not None:
                score = aggregate_metrics.to_simple_dict().get("Central val | accuracy")
                told = score is not None and central_iteration > 0  # in iteration 0 it is the untrained model's
                progress.round_ended(central_iteration + 1, 100 * float(score) if told else None)
            return False, Metrics()

    np.random.seed(options.seed)  # noqa: NPY002 - pfl draws from the global generator, and all processes must draw alike
    torch.manual_seed(options.seed)  # and begin with the same net
    images = work.Images(options.data, options.seed)
    x, y = (to_tensor(t) for t in images.split("train", options.device))
    x = x.permute(0, 2, 3, 1)
    users = {k: (x[samples].contiguous(), y[samples]) for k, samples in enumerate(torch.from_numpy(images.users))}
    del x, y
    federated = FederatedDataset.from_slices(users, get_user_sampler("random", range(len(users))))
    x_test, y_test = images.split("test", options.device)
    x_test = x_test.permute(0, 2, 3, 1).contiguous()

    net = pfl_model()
    model = PyTorchModel(
        model=net, local_optimizer_create=torch.optim.SGD, central_optimizer=torch.optim.SGD(net.parameters(), 1.0)
    )
    if progress is not None:
        progress.say(
            ready=True, parameters=sum(p.numel() for p in net.parameters()), processes=distributed.world_size,
            device=str(next(net.parameters()).device), users=len(users),
        )  # fmt: skip
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=options.rounds, evaluation_frequency=work.EVALUATE_EVERY,
            train_cohort_size=work.COHORT, val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=federated, val_data=federated, postprocessors=[WeightByUser()]),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_learning_rate=work.LR, local_num_epochs=work.EPOCHS, local_batch_size=work.BATCH
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=10_000),
        callbacks=[
            CentralEvaluationCallback(
                Dataset([x_test, y_test]), model_eval_params=NNEvalHyperParams(local_batch_size=10_000),
                frequency=work.EVALUATE_EVERY,
            ),
            Ends(),
        ],
    )  # fmt: skip
    if progress is not None:
        # pfl counts iterations from 0, so the round that ends the run has not been evaluated.
        progress.say(done=True, accuracy=round(work.accuracy(net, x_test, y_test), 2))


if __name__ == "__main__":
    main()
