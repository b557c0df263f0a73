"""The global model on the server's test images."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from fedentopt.datasets import Dataset
from fedentopt.simulation.augment import ImageTransform

BATCH = 500


@torch.no_grad()
def evaluate(model: torch.nn.Module, data: Dataset) -> tuple[float, float, list[float]]:
    """Accuracy in per cent, mean loss, and accuracy of every class (NaN for one without test images)."""
    transform = ImageTransform(data.mean, data.std)
    images, labels = torch.from_numpy(data.x_test.copy()), torch.from_numpy(data.y_test.astype("int64"))
    model.eval()
    loss, correct = 0.0, torch.zeros(data.num_classes, dtype=torch.float64)
    for x, y in zip(images.split(BATCH), labels.split(BATCH), strict=True):
        logits = model(transform.standardise(x))
        loss += float(F.cross_entropy(logits, y, reduction="sum"))
        correct += torch.bincount(y[logits.argmax(1) == y], minlength=data.num_classes)
    sizes = torch.bincount(labels, minlength=data.num_classes)
    return 100 * float(correct.sum()) / len(labels), loss / len(labels), (100 * correct / sizes).tolist()
