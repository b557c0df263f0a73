"""FedNTD: local models are kept from forgetting by distilling the global model's view of the classes that are not true.

Lee et al., "Preservation of the global knowledge by not-true distillation in federated learning", NeurIPS 2022:

    cross-entropy + beta tau^2 KL(softmax(g / tau) || softmax(z / tau))

where g and z are the logits of the global and of the local model without the true class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedentopt.algorithms.algorithm import Algorithm, algorithm
from fedentopt.settings import setting

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fedentopt.algorithms.local_code import Batch, LocalContext


@algorithm("fedntd", label="FedNTD")
class FedNTD(Algorithm):
    """FedAvg with not-true distillation of weight `beta` at temperature `tau`."""

    beta: float = setting(1.0, help="weight of the distillation", low=0)
    tau: float = setting(1.0, help="temperature of the distillation", above=0)

    def local_loss(self, model: nn.Module, start: nn.Module, batch: Batch, context: LocalContext) -> Tensor:
        import torch
        from torch.nn import functional as F

        logits = model(batch.x).float()
        with torch.no_grad():
            known = start(batch.x).float()
        ours, theirs = (F.log_softmax(not_true(z, batch.y) / self.tau, 1) for z in (logits, known))
        distance = F.kl_div(ours, theirs, reduction="batchmean", log_target=True)
        return F.cross_entropy(logits, batch.y) + self.beta * self.tau**2 * distance


def not_true(logits: Tensor, labels: Tensor) -> Tensor:
    """Logits (B, C) without each sample's true class: (B, C - 1)."""
    import torch

    places = torch.arange(logits.shape[1] - 1, device=logits.device).expand(len(logits), -1)
    return logits.gather(1, places + (places >= labels[:, None]))  # a mask would make the host wait for its count
