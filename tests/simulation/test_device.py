"""Torch's switches for the time of a simulation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import toy
from fedentopt.simulation.device import torch_settings


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_a_simulation_computes_on_one_thread_and_puts_the_others_back(three_threads: None) -> None:
    with torch_settings(torch.device("cpu"), "fp32"):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("trainer", ["loop", "stacked", "streams"])
def test_a_run_does_not_depend_on_the_callers_threads(trainer: str, three_threads: None) -> None:
    data, config = toy.images(), toy.config(model="toy:branching")
    [many] = toy.run([config], data, trainer=trainer)
    assert torch.get_num_threads() == 3
    torch.set_num_threads(1)
    [one] = toy.run([config], data, trainer=trainer)
    assert toy.difference(many, one) == 0
