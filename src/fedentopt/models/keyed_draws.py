"""Random numbers of any layer as a function of a key: F.dropout, attention and recurrent layers with dropout, noise.

`keyed_dropout` puts layers with keyed masks in the place of `nn.Dropout` and its kin. What draws without being such a
layer (`F.dropout`, `nn.MultiheadAttention`, `nn.TransformerEncoderLayer`, `nn.LSTM`, `nn.AlphaDropout`, `nn.RReLU`,
`F.scaled_dot_product_attention`, `torch.randn_like`, ...) ends in a few operations of torch that carry the tag
`nondeterministic_seeded`. While a `KeyedDraws` is active in a thread, these take their numbers from the step's key:
draw number j of a step is what a dropout layer of number FIRST + j would draw. So they too are the same alone, in a
sweep, resumed, in any number of threads, on CPU and GPU (normal and exponential draws there up to rounding).

Refused when a model is built: draws of an operation that is not listed here, draws in evaluation, draws of the backward
pass (as of `torch.utils.checkpoint`, which repeats a forward pass there), draws from a generator of the model's own.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedentopt.errors import InputError
from fedentopt.models.keyed_dropout import DropoutKey, uniform

FIRST = 1 << 20  # above the number of any dropout layer
ATTRIBUTE = "keyed_draws"
aten = torch.ops.aten
Named = Mapping[str, Any]


class KeyedDraws(TorchDispatchMode):
    """While active in a thread, torch's random operations there draw by `key`. `drawn` counts them since `begin`."""

    def __init__(self, key: DropoutKey, recurrent: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.key, self.recurrent = key, recurrent
        self.drawn = 0
        self.trying = False  # while a model is built
        self.refuses: str | None = None  # why any draw is refused at the moment

    def __deepcopy__(self, memo: dict[int, Any]) -> KeyedDraws:
        return KeyedDraws(copy.deepcopy(self.key, memo), self.recurrent)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Active for one step, whose draws begin anew."""
        self.drawn = 0
        with _plain_kernels(self.key.value.device, self.recurrent), self:
            yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        names = func._schema.arguments
        given = {a.name: a.default_value for a in names if a.has_default_value()}
        given |= {a.name: value for a, value in zip(names, args, strict=False)} | dict(kwargs)
        if given.get("dropout_p", given.get("dropout")) == 0 or False in (given.get("training"), given.get("train")):
            return func(*args, **kwargs)  # could draw, and does not
        if given.get("generator") is not None:
            if self.trying:
                raise InputError(f"{func} draws from a generator of its own, whose state is not kept with a run")
            return func(*args, **kwargs)  # one that a method's code was given for this client
        if self.refuses is not None:
            raise InputError(f"{func} {self.refuses}")
        known = _KEYED.get(func)
        if known is None:
            raise InputError(f"{func} draws random numbers that cannot be keyed")
        return known(self, given)

    def uniform(self, like: Tensor) -> Tensor:
        """float32 draws in [0, 1), as many and shaped as `like`, on its device."""
        number = FIRST + self.drawn
        self.drawn += 1
        return uniform(self.key.value.to(like.device), number, like.numel()).view(like.shape)

    def normal(self, like: Tensor) -> Tensor:
        """Draws of the standard normal distribution, by Box and Muller's formula."""
        radius = (-2 * torch.log1p(-self.uniform(like))).sqrt()
        return radius * torch.cos(2 * math.pi * self.uniform(like))


def _empty(given: Named) -> Tensor:
    """Room for what an operation that makes a tensor returns."""
    dtype = given.get("dtype")  # a default comes as a number, which torch does not take
    options: dict[str, Any] = {
        "dtype": dtype if isinstance(dtype, torch.dtype) else None,
        "device": given.get("device"),
    }
    if isinstance(given.get("self"), Tensor):
        return torch.empty_like(given["self"], **options)
    return torch.empty(given["size"], **options)


def _kept(draws: KeyedDraws, like: Tensor, p: float | Tensor) -> Tensor:
    # As a dropout layer keeps an element: where its draw is at least the share that is dropped.
    return draws.uniform(like) >= 1 - p


def _native_dropout(draws: KeyedDraws, given: Named) -> tuple[Tensor, Tensor]:
    x, p = given["input"], given["p"]
    kept = draws.uniform(x) >= p
    return x * kept * (1 / (1 - p) if p < 1 else 0), kept


def _rrelu(draws: KeyedDraws, given: Named, *, in_place: bool = False) -> Tensor:
    x, noise = given["self"], given["noise"]
    low, high = given["lower"], given["upper"]
    noise.copy_(torch.where(x <= 0, draws.uniform(x) * (high - low) + low, 1.0))
    out: Tensor = x.mul_(noise) if in_place else x * noise
    return out


def _integers(draws: KeyedDraws, given: Named) -> Tensor:
    low = given.get("low", 0)
    asked = given.get("dtype")
    whole = asked if isinstance(asked, torch.dtype) else given["self"].dtype if "self" in given else torch.int64
    room = _empty({**given, "dtype": whole})
    # In float64, where a draw of 24 bits times any width below 2**29 is exact.
    return room.copy_((draws.uniform(room).double() * (given["high"] - low)).floor() + low)


def _normal(draws: KeyedDraws, given: Named) -> Tensor:
    mean, std = given.get("mean", 0.0), given.get("std", 1.0)
    like = next((value for value in (mean, std) if isinstance(value, Tensor)), None)
    made: Tensor = draws.normal(_empty(given) if like is None else torch.empty_like(like)) * std + mean
    return made


def _filled(of: Callable[[KeyedDraws, Tensor, Named], Tensor]) -> Callable[[KeyedDraws, Named], Tensor]:
    """For operations that fill the tensor they are called on."""
    return lambda draws, given: given["self"].copy_(of(draws, given["self"], given))


def _made(of: Callable[[KeyedDraws, Tensor], Tensor]) -> Callable[[KeyedDraws, Named], Tensor]:
    """For operations that make a tensor."""

    def make(draws: KeyedDraws, given: Named) -> Tensor:
        room = _empty(given)
        return room.copy_(of(draws, room))

    return make


_KEYED: dict[Any, Callable[[KeyedDraws, Named], Any]] = {
    aten.bernoulli_.float: _filled(lambda draws, x, given: _kept(draws, x, given["p"])),
    aten.bernoulli_.Tensor: _filled(lambda draws, x, given: _kept(draws, x, given["p"])),
    aten.bernoulli.default: lambda draws, given: _kept(draws, given["self"], given["self"]).to(given["self"].dtype),
    aten.bernoulli.p: lambda draws, given: _kept(draws, given["self"], given["p"]).to(given["self"].dtype),
    aten.native_dropout.default: _native_dropout,
    aten.uniform_.default: _filled(
        lambda draws, x, given: draws.uniform(x) * (given["to"] - given["from"]) + given["from"]
    ),
    aten.rand.default: _made(KeyedDraws.uniform),
    aten.rand_like.default: _made(KeyedDraws.uniform),
    aten.normal_.default: _filled(lambda draws, x, given: draws.normal(x) * given["std"] + given["mean"]),
    aten.randn.default: _made(KeyedDraws.normal),
    aten.randn_like.default: _made(KeyedDraws.normal),
    aten.normal.float_float: _normal,
    aten.normal.Tensor_float: _normal,
    aten.normal.float_Tensor: _normal,
    aten.normal.Tensor_Tensor: _normal,
    aten.exponential_.default: _filled(
        # Above 0, as torch's: its logarithm is taken by the Gumbel softmax.
        lambda draws, x, given: -torch.log1p(-draws.uniform(x).clamp(min=2.0**-25)) / given["lambd"]
    ),
    aten.randint.default: _integers,
    aten.randint.low: _integers,
    aten.randint_like.default: _integers,
    aten.randint_like.low_dtype: _integers,
    aten.randperm.default: lambda draws, given: draws.uniform(
        torch.empty(given["n"], device=given.get("device"))
    ).argsort(stable=True),
    aten.rrelu_with_noise.default: _rrelu,
    aten.rrelu_with_noise_.default: lambda draws, given: _rrelu(draws, given, in_place=True),
}


@contextlib.contextmanager
def _plain_kernels(device: torch.device, recurrent: bool) -> Iterator[None]:
    """On a GPU, attention and recurrent layers in operations that can be keyed: fused kernels draw inside."""
    with contextlib.ExitStack() as settings:
        if device.type == "cuda":
            from torch.nn.attention import SDPBackend, sdpa_kernel

            settings.enter_context(sdpa_kernel(SDPBackend.MATH))
            if recurrent:
                settings.enter_context(torch.backends.cudnn.flags(enabled=False))
        yield


def key_draws(model: nn.Module, images: Tensor, key: DropoutKey | None) -> None:
    """Let a model whose forward draws in training carry a `KeyedDraws`; `images` are tried, `model` stays as it is.

    `key`: that of its dropout layers, None if it has none. Draws that cannot be keyed are refused.
    """
    recurrent = any(isinstance(layer, nn.RNNBase) and layer.dropout > 0 for layer in model.modules())
    draws = KeyedDraws(key or DropoutKey(), recurrent)
    tried = copy.deepcopy(model)  # batch statistics of the model itself must stay untouched
    before = torch.default_generator.get_state()
    draws.trying = True
    try:
        draws.refuses = "draws random numbers in evaluation mode, where F.dropout needs training=self.training"
        with torch.no_grad(), draws:
            tried.eval()(images)
        draws.refuses = None
        with draws.step():
            output = tried.train()(images)
        draws.refuses = "draws random numbers in the backward pass, where a mask of the forward pass is gone"
        if draws.drawn and isinstance(output, Tensor) and output.requires_grad:
            with draws:
                output.sum().backward()
    finally:
        draws.refuses, draws.trying = None, False
    if not torch.equal(before, torch.default_generator.get_state()):
        raise InputError("it draws from torch's global generator by an operation that torch does not mark as random")
    if draws.drawn:
        setattr(model, ATTRIBUTE, draws)


def keyed_draws(model: nn.Module) -> KeyedDraws | None:
    """What keys the draws of a model's forward, None if it draws nothing but in dropout layers."""
    found = vars(model).get(ATTRIBUTE)
    return found if isinstance(found, KeyedDraws) else None
