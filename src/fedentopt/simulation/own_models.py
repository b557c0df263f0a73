"""What a user's own model raises while a stack runs: one line with the place in the user's code, as hooks have it.

Trying two images when a model is built does not show everything: a forward may refuse a batch of one size, or a custom
autograd function its gradient. An exception is the model's if it was on the way through it when it last left our code;
any other passes as it is, bugs of ours and what a handler of signals raises among them.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType

import torch
from torch import nn

from fedentopt.errors import InputError
from fedentopt.models import keyed_draws
from fedentopt.own_code import describe_error, is_of_handler
from fedentopt.own_names import is_users

_CALLERS = tuple(
    f"fedentopt.{room}"
    for room in ("models", "simulation.trainers", "simulation.second_stage", "simulation.head_stage")
)
"""Where models are called. Elsewhere in a run only what has its own refusals is the user's, or what listens."""
_BACKWARD = (torch.Tensor.backward.__code__, torch.autograd.grad.__code__)
_TRANSPARENT = "fedentopt.models.keyed_draws"  # stands below every operation of a model that draws


@contextmanager
def refusing_own_model(name: str) -> Iterator[None]:
    """Around a stack of runs of the user's model `name`: refuse what it raises, exits of the process included. To run
    out of a GPU's memory is nobody's mistake."""
    try:
        yield
    except (InputError, torch.OutOfMemoryError):
        raise
    except (Exception, SystemExit) as raised:
        # On its way through a pool of threads, which is a generator, a StopIteration becomes the cause of a new error.
        error = raised.__cause__ if isinstance(raised.__cause__, StopIteration) else raised
        place = None if is_of_handler(error) else _place(error, name.partition(":")[0].partition(".")[0])
        if place is None:
            raise
        raise InputError(f"model: {name} raised {describe_error(error)}, in {place}") from error


def check_training(model: nn.Module, name: str, num_classes: int, image_size: int, *, plain_loss: bool) -> None:
    """Refuse an own model that puts other tensors in the place of its weights, where those that are averaged would not
    train, and with a plain loss one that gives something else than logits while it trains, as with an auxiliary
    classifier: that would fail, or take more columns for more classes. `model` stays as it is."""
    tried = copy.deepcopy(model).train()
    draws = keyed_draws(tried)
    before = {key: tensor.data_ptr() for key, tensor in tried.named_parameters()}
    with nullcontext() if draws is None else draws.step(), torch.no_grad():
        output = tried(torch.zeros(2, 3, image_size, image_size))
    moved = [key for key, tensor in tried.named_parameters() if before.get(key) != tensor.data_ptr()]
    if moved or len(before) != sum(1 for _ in tried.parameters()):
        raise InputError(
            f"model: {name} puts other tensors in the place of {moved[0] if moved else 'its parameters'} when it is "
            f"called; accepted: weights changed in place, as by clamp_"
        )
    if not plain_loss:
        return
    if not isinstance(output, torch.Tensor) or tuple(output.shape) != (2, num_classes):
        got = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        raise InputError(
            f"model: {name} gives {got} for two images while it trains; accepted: one row of {num_classes} logits per "
            f"image, (2, {num_classes}), unless a method's own local_loss takes more"
        )


def _place(error: BaseException, package: str) -> str | None:
    """Where in the user's model an exception was raised, None if it was not; `package` is the model's own."""
    steps = [step for step in traceback.walk_tb(error.__traceback__) if _module(step[0]) != _TRANSPARENT]
    ours = [n for n, (frame, _) in enumerate(steps) if _module(frame).partition(".")[0] == "fedentopt"]
    if not ours or not _module(steps[ours[-1]][0]).startswith(_CALLERS):
        return None
    inside = steps[ours[-1] + 1 :]
    for frame, line in reversed(inside):
        if _is_models(_module(frame), package):
            return f"{frame.f_code.co_qualname} ({_shown(frame.f_code.co_filename)}, line {line})"
    # Without a line of the user's, in a Sequential of torch's layers, the innermost of these.
    layers = [frame.f_locals["self"] for frame, _ in inside if frame.f_code is nn.Module._call_impl.__code__]
    if layers:
        return f"its layer {type(layers[-1]).__name__}"
    # What comes behind the model in there is a plain loss, which autograd knows the way back of.
    return "its backward pass" if inside and inside[0][0].f_code in _BACKWARD else None


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_models(module: str, package: str) -> bool:
    return bool(module) and (is_users(module) or module.partition(".")[0] == package != "torch")


def _shown(file: str) -> str:
    here, path = Path.cwd(), Path(file)
    return str(path.relative_to(here)) if path.is_relative_to(here) else file
