"""The contract of trainers, and the choice among them."""

from __future__ import annotations

import os
from typing import Protocol

import numpy as np
import torch
from torch import nn

from fedentopt.errors import InputError
from fedentopt.models import keeps_order
from fedentopt.simulation.augment import ImageTransform
from fedentopt.simulation.device import DeviceData
from fedentopt.simulation.layout import FlatLayout
from fedentopt.simulation.lowering import REACH, ConvBlock, lower
from fedentopt.simulation.trainers.loop import LoopTrainer
from fedentopt.simulation.trainers.padding_trial import can_map
from fedentopt.simulation.trainers.stacked import StackedTrainer
from fedentopt.simulation.trainers.stacked_nets import can_stack
from fedentopt.simulation.trainers.streams import StreamsTrainer
from fedentopt.simulation.trainers.wide_blocks import wide_blocks
from fedentopt.simulation.triton import Kernels, ops, runs_on, wide_runs_on
from fedentopt.simulation.work import Room, Trained, Work

TRAINERS = ("auto", "stacked", "streams", "loop")
STACK_PARAMETERS = 1_000_000  # larger models fill the GPU by themselves, and vmap would be slower
STREAM_SLOTS = 10


class MeanLosses(Protocol):
    """Mean losses that may still be on their way."""

    def read(self) -> np.ndarray:
        """(n,) float64, NaN for a client without samples; waits for the device the first time."""


class Trainer(Protocol):
    """Turns start models and a stack of work into trained models. Rows of models are flat (`FlatLayout`)."""

    name: str
    layout: FlatLayout

    def describe(self) -> str:
        """One line for people: what runs."""

    def reserve(self, room: Room) -> None:
        """Said once before the first round: how large a round can get. What is captured then serves all rounds."""

    def train(self, starts: torch.Tensor, work: Work, *, lend: bool = False) -> Trained:
        """(G, width) start models -> (N, width) trained ones, in the order of `work`; with losses if it wants them.

        With `lend`, the trained models may lie in the trainer's own memory: they are the caller's until it calls
        `train`, `shrink` or `close` again. That spares a copy of them all.
        """

    def predict(self, models: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        """Logits (G, M, C) of every model for uint8 images (M, c, H, W), without augmentation."""

    def soft_labels(self, trained: torch.Tensor, samples: list[np.ndarray]) -> np.ndarray:
        """Mean softmax of each model over its own training samples, (N, C)."""

    def mean_losses(self, models: torch.Tensor, rows: list[int], samples: list[np.ndarray]) -> MeanLosses:
        """Mean plain cross-entropy of model `models[rows[i]]` on the training samples `samples[i]`, per client.

        Without augmentation, in evaluation mode. On CUDA the passes are queued, and nothing is waited for.
        """

    def shrink(self) -> str | None:
        """Use less memory from now on; says how, or None if nothing is left to give."""

    def close(self) -> None: ...


def resolve_device(name: str) -> torch.device:
    """auto, cpu, cuda or cuda:N; a device that is not there is refused."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cpu":
        return torch.device("cpu")
    kind, _, number = name.partition(":")
    if kind != "cuda" or (number and not number.isdigit()):
        raise InputError(f"device: {name!r} is unknown; accepted: auto, cpu, cuda, cuda:N")
    if not torch.cuda.is_available():
        raise InputError(f"device: {name!r} was asked for, but torch sees no CUDA device; accepted here: auto, cpu")
    if number and int(number) >= torch.cuda.device_count():
        raise InputError(f"device: {name!r} was asked for, but there are {torch.cuda.device_count()} CUDA device(s)")
    return torch.device(name)


def choose_trainer(
    name: str, model: nn.Module, device: torch.device, image_size: int, *, code: bool = False, batch: int = 1,
    precision: str = "fp32",
) -> str:  # fmt: skip
    """The trainer that "auto" stands for; a named one is checked against model, device, whether local objectives are
    `code`, the largest `batch` that passes the model, and the precision."""
    if name not in TRAINERS:
        raise InputError(f"trainer: {name!r} is unknown; accepted: {', '.join(TRAINERS)}")
    if name == "loop" and device.type != "cpu":
        raise InputError("trainer: loop runs on the CPU only; accepted with CUDA: auto, stacked, streams")
    if name == "auto" and device.type == "cpu":
        return "loop"
    if name in ("loop", "streams"):
        return name
    wide = wide_runs_on(device) and wide_blocks(model, image_size) is not None
    if name == "auto" and not wide and sum(p.numel() for p in model.parameters()) > STACK_PARAMETERS:
        return "streams"
    refusal = _refuse_stacked(model, device, image_size, wide=wide, code=code, batch=batch, precision=precision)
    if name == "stacked" and refusal is not None:
        raise InputError(f"trainer: {refusal}")
    return "stacked" if refusal is None else "streams"


def _refuse_stacked(
    model: nn.Module, device: torch.device, image_size: int, *, wide: bool, code: bool, batch: int, precision: str
) -> str | None:
    """Why a model, on the wide kernels if `wide`, cannot be stacked; None where it can."""
    most = _most_images(model, image_size, device, wide=wide)
    if most is not None and batch > most:
        return (
            f"batches of {batch} images of {image_size} x {image_size} pixels make maps larger than the stacked "
            f"kernels can address, at most {most} images; accepted: auto, streams, or smaller images"
        )
    accepted = "accepted: auto, streams, loop"
    if not wide and not can_stack(model):
        return f"a model with BatchNorm, other buffers, dropout or frozen parameters cannot be stacked; {accepted}"
    if not wide and not can_map(model, image_size):
        return (
            "a model whose forward looks across samples, makes no numbers of an image of zeros, or does what "
            f"torch.func.vmap cannot map cannot be stacked; {accepted}"
        )
    if not wide and precision == "bf16" and lower(model, _kernels(device, precision).fuses_conv) is None:
        return (
            "torch.func.vmap, through which this model would be stacked, has no products in bf16; "
            f"{accepted}, or another precision"
        )
    if code:
        return f"a method whose local objective is code trains client by client and cannot be stacked; {accepted}"
    return None


def _most_images(model: nn.Module, image_size: int, device: torch.device, *, wide: bool) -> int | None:
    """Images of one batch that the stacked kernels can address; None where these do not run."""
    if not runs_on(device):
        return None
    few = lower(model, _kernels(device, "fp32").fuses_conv)
    if few is None:
        blocks = wide_blocks(model, image_size) if wide else None
        return None if blocks is None else blocks.most_images(image_size)
    size, numbers = image_size, 3 * image_size**2
    for block in few:
        if isinstance(block, ConvBlock):
            outputs, _, side, _ = model.get_parameter(block.weight).shape
            size = (size - side + 1) // 2
            numbers = max(numbers, outputs * size**2)
    return REACH // numbers


def make_trainer(
    name: str, model: nn.Module, layout: FlatLayout, data: DeviceData, transform: ImageTransform, *,
    precision: str, workers: int | None,
) -> Trainer:  # fmt: skip
    """Build a chosen trainer."""
    if name == "loop":
        return LoopTrainer(model, layout, data, transform, workers or usable_cores(), precision)
    kernels = _kernels(data.images.device, precision)
    if name == "stacked":
        return StackedTrainer(model, layout, data, transform, kernels)
    slots = STREAM_SLOTS if data.images.is_cuda else 1
    return StreamsTrainer(model, layout, data, transform, kernels, slots, precision)


def usable_cores() -> int:
    """Cores this process may run on, which a container or a batch system may have narrowed."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def wants_channels_last(name: str, model: nn.Module, image_size: int, device: torch.device, precision: str) -> bool:
    """Ordinary and wide convolutions like weights in that order; the stacked kernels for few channels do not, and some
    models of the user's cannot have it."""
    if keeps_order(model):
        return False
    if name != "stacked":
        return True
    few = lower(model, _kernels(device, precision).fuses_conv) is not None
    return not few and wide_blocks(model, image_size) is not None


def _kernels(device: torch.device, precision: str) -> Kernels:
    return ops(device, exact=precision == "fp32-exact", bf16=precision == "bf16")
