"""An ordinary module that lives inside one flat row."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedentopt.models import dropout_key, keyed_draws
from fedentopt.randomness import GOLDEN, mix64_torch, signed
from fedentopt.simulation.layout import FlatLayout, TensorSlot
from fedentopt.simulation.lowering import pool_before_relu


class BoundModel:
    """A copy of `model` whose tensors are views of `row` and whose gradients are views of `gradient`.

    One that does not train is in evaluation mode and has no gradients.
    """

    def __init__(self, model: nn.Module, layout: FlatLayout, device: torch.device, *, trains: bool = True) -> None:
        self.layout = layout
        self.module = pool_before_relu(copy.deepcopy(model)).to(device)
        _normalise_lone_values(self.module)
        _keep_silu_inputs(self.module)
        self.row = torch.zeros(layout.width, device=device)
        self.gradient = torch.zeros(layout.width if trains else 0, device=device)
        layout.bind(self.module, self.row, self.gradient if trains else None)
        if not trains:
            self.module.eval().requires_grad_(False)
        self._gradients = [(p, p.grad) for p in self.module.parameters() if p.grad is not None]
        self._integers = _gather_integers(self.module, layout, device)
        self._assigned = _assigned_buffers(self.module, layout)
        self._key = dropout_key(self.module)
        self._draws = keyed_draws(self.module)
        if self._key is not None:
            self._key.value = self._key.value.to(device)

    @property
    def parameters(self) -> torch.Tensor:
        return self.row[: self.layout.parameter_width]

    @property
    def parameter_gradient(self) -> torch.Tensor:
        return self.gradient[: self.layout.parameter_width]

    def reset(self) -> None:
        """In training mode and trained whole, whatever a user's code has done to the module's layers."""
        self.module.train()
        for parameter, gradient in self._gradients:
            parameter.requires_grad_(True)
            parameter.grad = gradient

    def clear_gradient(self) -> None:
        """Zeros, and every parameter's gradient where it was bound, wherever a user's code has put it since."""
        self.gradient.zero_()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient

    @property
    def integers(self) -> list[torch.Tensor]:
        """The whole numbers of the model, which live beside the row while it trains."""
        return [values for values, _ in self._integers]

    def take_buffers(self) -> None:
        """After a step: what a forward of a user's own has assigned to a buffer (`self.mean = ...`) into its place."""
        for owner, leaf, place in self._assigned:
            value = owner._buffers[leaf]
            if value is None or value.data_ptr() != place.data_ptr():
                if value is not None:
                    place.copy_(value.detach())
                owner._buffers[leaf] = place.detach()

    def load(self, row: torch.Tensor) -> None:
        """Take over a model, whole numbers included."""
        self.take_buffers()  # an evaluation may have left some elsewhere
        self.row.copy_(row)
        self.read_integers()

    def store(self, out: torch.Tensor) -> None:
        """Write the model, whole numbers included, into `out` (width,)."""
        for values, places in self._integers:
            self.row.index_copy_(0, places, values.to(self.row.dtype))
        out.copy_(self.row)

    def read_integers(self) -> None:
        """Take the whole numbers from the row, after something else than `load` has written it."""
        for values, places in self._integers:
            values.copy_(self.row.index_select(0, places).round_())

    def set_dropout_key(self, client_key: torch.Tensor, step: torch.Tensor) -> None:
        """The key of this step's dropout masks, from the client's key and the step number, on the device."""
        if self._key is not None:
            self._key.set(step_keys(client_key, step).reshape(()))

    def pick_dropout_key(self, keys: torch.Tensor, step: torch.Tensor) -> None:
        """The same from the keys of all steps (T,): a look-up, where the hash is a dozen kernels of one number each."""
        if self._key is not None:
            self._key.set(keys.index_select(0, step).reshape(()))

    @property
    def draws(self) -> bool:
        """Whether the model draws otherwise than in dropout layers."""
        return self._draws is not None

    def drawing(self) -> contextlib.AbstractContextManager[None]:
        """Around a step of training: whatever the model draws there is drawn by the step's key."""
        return contextlib.nullcontext() if self._draws is None else self._draws.step()

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Plain logits in evaluation mode."""
        self.module.eval()
        with torch.no_grad():
            result: torch.Tensor = self.module(x.contiguous(memory_format=torch.channels_last))
        return result.float()


def mixes_samples(model: nn.Module) -> bool:
    """Whether a sample's gradient depends on the others of its batch: BatchNorm's does, with or without statistics."""
    return any(isinstance(layer, _BatchNorm) for layer in model.modules())


def step_keys(client_key: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """The keys of a client's dropout masks in the given steps."""
    return mix64_torch(client_key + step * signed(GOLDEN))


def _gather_integers(
    model: nn.Module, layout: FlatLayout, device: torch.device
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Make the integer buffers of `model` views of one tensor per type; these tensors and their places in a row.

    BatchNorm counts its batches in a tensor of one number per layer: together they move in a few operations, not in a
    few for every layer.
    """
    by_type: dict[torch.dtype, list[TensorSlot]] = defaultdict(list)
    for slot in layout.integer_slots():
        by_type[slot.dtype].append(slot)
    gathered = []
    for dtype, slots in by_type.items():
        places = torch.cat([torch.arange(slot.offset, slot.offset + slot.size) for slot in slots])
        values = torch.zeros(len(places), dtype=dtype, device=device)
        first = 0
        for slot in slots:
            owner, _, leaf = slot.name.rpartition(".")
            module = model.get_submodule(owner)
            view = replace(slot, offset=first).view(values[None])[0]
            view.copy_(module._buffers[leaf])  # type: ignore[arg-type]
            module._buffers[leaf] = view.data
            first += slot.size
        gathered.append((values, places.to(device)))
    return gathered


def _assigned_buffers(model: nn.Module, layout: FlatLayout) -> list[tuple[nn.Module, str, torch.Tensor]]:
    """Owner, name and place of the buffers that are not those of torch's own layers, which write in place."""
    found = []
    for slot in layout.slots:
        owner, _, leaf = slot.name.rpartition(".")
        module = model.get_submodule(owner)
        value = module._buffers.get(leaf)
        if value is not None and not type(module).__module__.startswith("torch."):
            found.append((module, leaf, value.data))
    return found


def _normalise_lone_values(model: nn.Module) -> None:
    """Let BatchNorm take a batch that gives it one value per channel: one sample whose map has shrunk to 1x1.

    Such a batch has no variance, and torch refuses it. The layer normalises it by its running statistics, as in
    evaluation, and leaves those as they are; one without such statistics finds every value at the mean. Batches with
    more values are none of its business.
    """

    def before(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        x = inputs[0]
        layer.lone = layer.training and x.numel() == x.shape[1]  # type: ignore[assignment]
        if layer.lone:
            layer.eval()

    def after(layer: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if layer.lone:
            layer.train()

    for layer in model.modules():
        if not isinstance(layer, _BatchNorm):
            continue
        if layer.running_mean is None:
            layer.forward = partial(_at_the_mean, layer, layer.forward)  # type: ignore[method-assign]
        else:
            layer.register_forward_pre_hook(before)
            layer.register_forward_hook(after)


def _at_the_mean(layer: _BatchNorm, forward: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    if x.numel() != x.shape[1]:
        return forward(x)
    shape = (1, -1, *(1,) * (x.dim() - 2))
    y = x - x.detach()
    if layer.weight is not None:
        y = y * layer.weight.view(shape)
    return y if layer.bias is None else y + layer.bias.view(shape)


def _keep_silu_inputs(model: nn.Module) -> None:
    """Let SiLU behind BatchNorm write its output elsewhere than over its input, of which autograd keeps a copy then.

    Only where the input is nobody else's: in a Sequential, and where the layer stands in that place alone.
    """
    places = Counter(id(layer) for _, layer in model.named_modules(remove_duplicate=False))
    for sequence in model.modules():
        if not isinstance(sequence, nn.Sequential) or type(sequence).forward is not nn.Sequential.forward:
            continue
        for first, second in pairwise(sequence):
            if isinstance(first, _BatchNorm) and type(second) is nn.SiLU and places[id(second)] == 1:
                second.inplace = False
