"""Flat rows: where tensors lie, in which order, and the plain order in which checkpoints keep them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedentopt.simulation.layout import FlatLayout


class Mixed(nn.Module):
    """Every kind of tensor that a row may hold: convolutions among plain tensors, buffers, what never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 3, (2, 5))  # 60 weights
        self.gain = nn.Parameter(torch.randn(3))
        self.norm = nn.BatchNorm2d(3)
        self.second = nn.Conv2d(3, 5, 3, bias=False)  # 135 weights, not a multiple of four
        self.last = nn.Linear(7, 3)
        self.frozen = nn.Conv2d(2, 2, 3, bias=False)
        self.frozen.requires_grad_(False)
        self.register_buffer("picture", torch.randn(2, 3, 4, 5))  # four dimensions, and no weight
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
        for buffer in (self.norm.running_mean, self.norm.running_var):
            buffer.copy_(torch.randn(3))
        self.norm.num_batches_tracked.fill_(7)


def states(count: int) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(3)
    return [{name: value.clone() for name, value in Mixed().state_dict().items()} for _ in range(count)]


def rows_of(layout: FlatLayout, models: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    return torch.stack([layout.pack(state) for state in models])


TRAINED = [
    "gain", "first.weight", "first.bias", "norm.weight", "norm.bias", "second.weight", "last.weight", "last.bias",
]  # fmt: skip
MOVING = ["picture", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
FIXED = ["mask", "frozen.weight"]


@pytest.mark.parametrize("channels_last", [False, True])
def test_parameters_come_first_then_buffers_then_what_never_changes(channels_last):
    layout = FlatLayout(Mixed(), channels_last=channels_last)
    assert [slot.name for slot in layout.slots] == [*TRAINED, *MOVING, *FIXED]
    assert [slot.name for slot in layout.parameters] == TRAINED
    sizes = {slot.name: slot.size for slot in layout.slots}
    assert sizes == {name: value.numel() for name, value in Mixed().state_dict().items()}
    padded = {name: -(-size // 4) * 4 for name, size in sizes.items()}
    ends = [0]
    for slot in layout.slots:
        assert slot.offset == ends[-1]
        ends.append(ends[-1] + padded[slot.name])
    assert layout.parameter_width == ends[len(TRAINED)] == 4 + 60 + 4 + 4 + 4 + 136 + 24 + 4
    assert layout.moving_width == ends[len(TRAINED) + len(MOVING)]
    assert layout.width == ends[-1]
    assert layout.num_parameters == 3 + 60 + 3 + 3 + 3 + 135 + 21 + 3
    assert layout.model_bytes == sum(
        value.numel() * value.element_size() for value in Mixed().state_dict().values()
    )  # int64 counts eight bytes
    assert {slot.name for slot in layout.slots if slot.channels_last} == (
        {"first.weight", "second.weight", "picture", "frozen.weight"} if channels_last else set()
    )
    empty = layout.padding(torch.device("cpu"))
    assert empty is not None
    assert int((~empty).sum()) == layout.num_parameters
    assert bool(empty[3])
    assert not bool(empty[2])


def test_a_layout_without_padding_says_so():
    assert FlatLayout(nn.Linear(4, 4)).padding(torch.device("cpu")) is None


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_row_holds_every_tensor_in_its_order(channels_last):
    layout = FlatLayout(Mixed(), channels_last=channels_last)
    (state,) = states(1)
    row = layout.pack(state)
    for slot in layout.slots:
        tensor = state[slot.name]
        last = channels_last and tensor.dim() == 4
        expected = (tensor.permute(0, 2, 3, 1) if last else tensor).flatten().float()
        assert torch.equal(row[slot.offset : slot.offset + slot.size], expected), slot.name
    restored = layout.unpack(row)
    assert restored.keys() == state.keys()
    for name, value in state.items():
        assert torch.equal(restored[name], value), name
        assert restored[name].dtype == value.dtype


def canonical(layout: FlatLayout, models: list[dict[str, torch.Tensor]], width: int) -> torch.Tensor:
    """Rows with every tensor in its plain order, written down straight."""
    rows = torch.zeros(len(models), layout.width)
    for row, state in zip(rows, models, strict=True):
        for slot in layout.slots:
            row[slot.offset : slot.offset + slot.size] = state[slot.name].flatten()
    return rows[:, :width]


@pytest.mark.parametrize("part", ["full", "parameters"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_checkpoints_keep_the_plain_order(channels_last, part):
    """Models are rows of full width, an algorithm's vectors of parameter width."""
    layout, models = FlatLayout(Mixed(), channels_last=channels_last), states(3)
    width = layout.width if part == "full" else layout.parameter_width
    rows = rows_of(layout, models)[:, :width].contiguous()
    before = rows.clone()
    plain = layout.to_canonical(rows)
    assert torch.equal(plain, canonical(layout, models, width))
    assert torch.equal(rows, before), "what was given stays"
    assert plain.data_ptr() != rows.data_ptr()
    again = layout.from_canonical(plain)
    assert torch.equal(again, before)
    assert torch.equal(plain, canonical(layout, models, width))
    assert torch.equal(rows, rows_of(layout, models)[:, :width])
    moved = not torch.equal(plain, rows)
    assert moved == channels_last, "the case was not hard"


def test_a_row_of_one_trainer_is_read_by_another():
    models = states(2)
    plain, last = FlatLayout(Mixed()), FlatLayout(Mixed(), channels_last=True)
    rows = rows_of(last, models)
    assert torch.equal(plain.from_canonical(last.to_canonical(rows)), rows_of(plain, models))
    assert torch.equal(last.from_canonical(plain.to_canonical(rows_of(plain, models))), rows)


def test_views_share_the_rows_memory():
    layout, models = FlatLayout(Mixed(), channels_last=True), states(2)
    rows = rows_of(layout, models)
    views = layout.parameter_views(rows)
    assert list(views) == TRAINED
    for name, view in views.items():
        assert torch.equal(view, torch.stack([state[name] for state in models]))
    views["second.weight"].fill_(2.5)
    assert torch.equal(layout.unpack(rows[1])["second.weight"], torch.full((5, 3, 3, 3), 2.5))
    assert torch.equal(layout.unpack(rows[1])["first.weight"], models[1]["first.weight"])
