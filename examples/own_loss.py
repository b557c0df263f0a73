"""A local objective written as code: clients also learn from the answers of the global model.

fedentopt compare --method fedavg --method own_loss:Distilled:weight=0.1
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedentopt.algorithms import Algorithm, Batch, LocalContext, setting


class Distilled(Algorithm):
    """FedAvg whose clients keep in mind what the model they started from says to their images.

    Local half: (1 - weight) * cross-entropy to the labels + weight * cross-entropy to that model's softmax.
    """

    weight: float = setting(0.2, help="part of the loss that the global model's answers make up", low=0, high=1)

    def local_loss(self, model: nn.Module, start: nn.Module, batch: Batch, context: LocalContext) -> Tensor:
        """The loss of one batch, a scalar."""
        logits = model(batch.x).float()
        with torch.no_grad():
            answers = start(batch.x).float().softmax(1)
        return (1 - self.weight) * F.cross_entropy(logits, batch.y) + self.weight * F.cross_entropy(logits, answers)
