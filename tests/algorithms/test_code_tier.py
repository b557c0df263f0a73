"""Local objectives as code, FedNTD and MOON: the loss of one batch by hand, and where its gradient goes."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log, sqrt

import pytest
import torch
from torch import nn

from fedentopt.algorithms import ALGORITHMS, FedNTD, Moon, overrides


class Net(nn.Module):
    """Features are `body(x)`, logits `head(features)`."""

    def __init__(self, body: list[list[float]], head: list[list[float]]) -> None:
        super().__init__()
        self.body, self.head = (nn.Linear(len(rows[0]), len(rows), bias=False) for rows in (body, head))
        for layer, rows in ((self.body, body), (self.head, head)):
            layer.load_state_dict({"weight": torch.tensor(rows)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


@dataclass(frozen=True)
class Outputs:
    features: torch.Tensor
    logits: torch.Tensor


@dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    y: torch.Tensor


class Context:
    """What a local loss is told beside the models and the batch."""

    def __init__(self, previous: nn.Module | None = None) -> None:
        self.previous = previous

    def outputs(self, model: Net, x: torch.Tensor) -> Outputs:
        features = model.body(x)
        return Outputs(features, model.head(features))

    def features(self, model: Net, x: torch.Tensor) -> torch.Tensor:
        return model.body(x)


ONE = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]


def softmax(*z: float) -> list[float]:
    total = sum(map(exp, z))
    return [exp(one) / total for one in z]


def divergence(p: list[float], q: list[float]) -> float:
    """KL(p || q) in nats."""
    return sum(a * log(a / b) for a, b in zip(p, q, strict=True))


def test_which_methods_are_code():
    assert [cls.name for cls in ALGORITHMS if overrides(cls(), "local_loss")] == ["fedntd", "moon"]
    assert [cls.name for cls in ALGORITHMS if cls.keeps_models] == ["moon"]


def test_fedntd_by_hand():
    # Two samples, local logits z = x. Without the true classes 2 and 0:
    #   z = (1, 0, 2) -> (1, 0), global logits g = (0, 2, 9) -> (0, 2); z = (5, 1, -1) -> (1, -1), g -> (2, 3).
    model = Net(ONE, ONE)
    start = Net([[0.0, 0.4, 0.0], [2.0, -7.0, 0.0], [4.5, 0.0, 0.0]], ONE)
    x = torch.tensor([[1.0, 0.0, 2.0], [5.0, 1.0, -1.0]])
    torch.testing.assert_close(start(x), torch.tensor([[0.0, 2.0, 4.5], [0.4, 3.0, 22.5]]))
    entropy = (-log(softmax(1, 0, 2)[2]) - log(softmax(5, 1, -1)[0])) / 2
    distances = [
        divergence(softmax(0, 2 / 2), softmax(1 / 2, 0)),
        divergence(softmax(3 / 2, 22.5 / 2), softmax(1 / 2, -1 / 2)),
    ]
    loss = FedNTD(beta=3.0, tau=2.0).local_loss(model, start, Batch(x, torch.tensor([2, 0])), Context())
    assert loss.shape == ()
    assert loss.item() == pytest.approx(entropy + 3 * 2**2 * sum(distances) / 2, rel=1e-5)
    plain = FedNTD(beta=0.0).local_loss(model, start, Batch(x, torch.tensor([2, 0])), Context())
    assert plain.item() == pytest.approx(entropy, rel=1e-5)


def test_fedntd_distils_from_the_start_and_not_into_it():
    model, start = Net(ONE, ONE), Net(ONE, ONE)
    batch = Batch(torch.tensor([[1.0, 0.0, 2.0]]), torch.tensor([2]))
    loss = FedNTD(beta=1.0).local_loss(model, start, batch, Context())
    assert loss.item() == pytest.approx(-log(softmax(1, 0, 2)[2]), rel=1e-6)  # the same model: nothing to distil
    loss.backward()
    assert all(p.grad is None for p in start.parameters())
    # At equal models the distillation has no slope, so the gradient is cross-entropy's: softmax - one hot, times x.
    p = torch.tensor(softmax(1, 0, 2)) - torch.tensor([0.0, 0.0, 1.0])
    torch.testing.assert_close(model.head.weight.grad, torch.outer(p, batch.x[0]))


def test_the_true_class_has_no_part_in_the_distillation():
    start = Net(ONE, ONE)
    model = Net(ONE, ONE)
    with torch.no_grad():
        model.head.weight[2] *= 3.0  # of the true class
    batch = Batch(torch.tensor([[1.0, 0.5, 2.0]]), torch.tensor([2]))
    weak, strong = (FedNTD(beta=b).local_loss(model, start, batch, Context()).item() for b in (0.0, 50.0))
    assert weak == pytest.approx(strong, abs=1e-6)


def moon_net(body: list[list[float]]) -> Net:
    return Net(body, [[2.0, 0.0], [0.0, 1.0]])


def test_moon_by_hand():
    # Features of x: the local model's are x itself, the global model's (x2, x1), the last one's (x1 + x2, x2).
    model, start = moon_net([[1.0, 0.0], [0.0, 1.0]]), moon_net([[0.0, 1.0], [1.0, 0.0]])
    previous = moon_net([[1.0, 1.0], [0.0, 1.0]])
    x = torch.tensor([[1.0, 0.0], [1.0, 2.0]])
    # Cosines to the global features: 0 and 4 / 5; to the last one's (1, 0) and (3, 2): 1 and 7 / sqrt(5 * 13).
    terms = [-log(exp(g / 0.25) / (exp(g / 0.25) + exp(p / 0.25))) for g, p in ((0, 1), (0.8, 7 / sqrt(65)))]
    entropy = (-log(softmax(2, 0)[0]) - log(softmax(2, 2)[1])) / 2
    batch = Batch(x, torch.tensor([0, 1]))
    loss = Moon(mu=0.5, tau=0.25).local_loss(model, start, batch, Context(previous))
    assert loss.shape == ()
    assert loss.item() == pytest.approx(entropy + 0.5 * sum(terms) / 2, rel=1e-5)


def test_moon_without_a_last_model_is_cross_entropy():
    model, start = moon_net([[1.0, 0.0], [0.0, 1.0]]), moon_net([[0.0, 1.0], [1.0, 0.0]])
    batch = Batch(torch.tensor([[1.0, 0.0]]), torch.tensor([0]))
    loss = Moon(mu=5.0).local_loss(model, start, batch, Context(None))
    assert loss.item() == pytest.approx(-log(softmax(2, 0)[0]), rel=1e-5)


def test_moon_draws_features_to_the_global_model_and_away_from_the_last():
    model, start = moon_net([[1.0, 0.0], [0.0, 1.0]]), moon_net([[0.0, 1.0], [1.0, 0.0]])
    previous = moon_net([[1.0, -0.2], [0.0, 1.0]])
    batch = Batch(torch.tensor([[1.0, 0.3]]), torch.tensor([0]))

    def similarities() -> tuple[float, float]:
        f = [net.body(batch.x) for net in (model, start, previous)]
        return tuple(torch.cosine_similarity(f[0], other).item() for other in f[1:])

    before = similarities()
    Moon(mu=100.0).local_loss(model, start, batch, Context(previous)).backward()
    assert all(p.grad is None for net in (start, previous) for p in net.parameters())
    with torch.no_grad():
        model.body.weight -= 0.001 * model.body.weight.grad
    after = similarities()
    assert after[0] > before[0]
    assert after[1] < before[1]
