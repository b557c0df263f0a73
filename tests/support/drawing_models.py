"""Models for 8x8 images with layers that draw random numbers: as people write them, one per stock layer of torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 24  # of a token: one row of an image, all channels


class _Tokens(nn.Module):
    """Eight tokens per image through `layer`, then a linear layer on all of them."""

    def __init__(self, num_classes: int, layer: nn.Module, width: int = WIDTH) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(8 * width, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x.permute(0, 2, 1, 3).flatten(2) - 0.5)
        return self.head((out[0] if isinstance(out, tuple) else out).flatten(1))


class _Attention(nn.MultiheadAttention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x, x, x, need_weights=self.num_heads == 2)[0]


class _Functional(nn.Module):
    """What a forward of one's own draws, by `draw(self, x)`."""

    def __init__(self, num_classes: int, draw) -> None:
        super().__init__()
        self.draw, self.head = draw, nn.Linear(3 * 8 * 8, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.draw(self, x.flatten(1)) if self.training else x.flatten(1))


def _stock(layer) -> object:
    return lambda num_classes: _Tokens(num_classes, layer())


def _own(draw) -> object:
    return lambda num_classes: _Functional(num_classes, draw)


def _mixes(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    share = torch.rand(len(x), 1, device=x.device)
    return x.lerp(x[torch.randperm(len(x), device=x.device)], share)


def _attends(self, x: torch.Tensor) -> torch.Tensor:
    tokens = x.unflatten(1, (8, WIDTH))
    return F.scaled_dot_product_attention(tokens, tokens, tokens, dropout_p=0.4).flatten(1)


f_dropout = _own(lambda self, x: F.dropout(x, 0.4, self.training))
f_dropout_in_place = _own(lambda self, x: F.dropout(x * 1.0, 0.4, self.training, inplace=True))
f_dropout2d = _own(lambda self, x: F.dropout2d(x.unflatten(1, (3, 8, 8)), 0.4, self.training).flatten(1))
f_alpha_dropout = _own(lambda self, x: F.alpha_dropout(x, 0.4, self.training))
f_attention = _own(_attends)
f_gumbel = _own(lambda self, x: x * F.gumbel_softmax(x, tau=2.0))
noise = _own(lambda self, x: x + 0.3 * torch.randn_like(x))
mixed_up = _own(_mixes)
alpha_dropout = _stock(lambda: nn.AlphaDropout(0.4))
feature_alpha_dropout = _stock(lambda: nn.FeatureAlphaDropout(0.4))
rrelu = _stock(nn.RReLU)
attention = _stock(lambda: _Attention(WIDTH, 2, dropout=0.4, batch_first=True))
fused_attention = _stock(lambda: _Attention(WIDTH, 4, dropout=0.4, batch_first=True))
transformer = _stock(lambda: nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.3, batch_first=True))
lstm = _stock(lambda: nn.LSTM(WIDTH, WIDTH, 2, dropout=0.4, batch_first=True))
gru = _stock(lambda: nn.GRU(WIDTH, WIDTH, 2, dropout=0.4, batch_first=True))
rnn = _stock(lambda: nn.RNN(WIDTH, WIDTH, 2, dropout=0.4, batch_first=True))
beside_a_layer = _stock(lambda: nn.Sequential(nn.Dropout(0.3), nn.RReLU(), nn.Dropout2d(0.3)))

DRAWING = (
    "f_dropout", "f_dropout_in_place", "f_dropout2d", "f_alpha_dropout", "f_attention", "f_gumbel", "noise", "mixed_up",
    "alpha_dropout", "feature_alpha_dropout", "rrelu", "attention", "fused_attention", "transformer", "lstm", "gru",
    "rnn", "beside_a_layer",
)  # fmt: skip

# What is refused.


class _Always(_Functional):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.dropout(x.flatten(1), 0.5))


class _Own(_Functional):
    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes, lambda self, x: x + torch.randn(x.shape, generator=self.generator))
        self.generator = torch.Generator()


def in_evaluation(num_classes: int) -> nn.Module:
    return _Always(num_classes, None)


def own_generator(num_classes: int) -> nn.Module:
    return _Own(num_classes)


repeated = _own(
    lambda self, x: checkpoint(lambda x: F.dropout(self.head.weight.sum() * x, 0.5), x, use_reentrant=False)
)
unknown = _own(lambda self, x: torch.poisson(x.abs()))
