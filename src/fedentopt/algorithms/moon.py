"""MOON: local features are drawn to the global model's and away from those of the client's last model.

Li, He & Song, "Model-contrastive federated learning", CVPR 2021:

    cross-entropy - mu log( e^(s_glob / tau) / (e^(s_glob / tau) + e^(s_prev / tau)) )

with s the cosine similarity of the features f, the input of the last layer (the paper adds a projection head), to those
of the global model and to those of the client's model of its last round. The first time a client trains there is no
such model and no such term.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedentopt.algorithms.algorithm import Algorithm, algorithm
from fedentopt.settings import setting

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fedentopt.algorithms.local_code import Batch, LocalContext


@algorithm("moon", label="MOON")
class Moon(Algorithm):
    """FedAvg with a contrastive term of weight `mu` at temperature `tau`."""

    mu: float = setting(1.0, help="weight of the contrastive term", low=0)
    tau: float = setting(0.5, help="temperature of the contrastive term", above=0)
    keeps_models = True

    def local_loss(self, model: nn.Module, start: nn.Module, batch: Batch, context: LocalContext) -> Tensor:
        import torch
        from torch.nn import functional as F

        ours = context.outputs(model, batch.x)
        loss = F.cross_entropy(ours.logits, batch.y)
        if context.previous is None:
            return loss
        with torch.no_grad():
            anchors = [context.features(other, batch.x) for other in (start, context.previous)]
        similarities = torch.stack([F.cosine_similarity(ours.features, f) for f in anchors], 1) / self.tau
        return loss - self.mu * F.log_softmax(similarities, 1)[:, 0].mean()
