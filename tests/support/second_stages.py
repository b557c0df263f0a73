"""Runs in their second stage."""

from __future__ import annotations

import torch

import toy
from fedentopt.simulation.engine import RunOptions, Stack, Task, run_stack


def in_second_stage(configs: list, data, device: str = "cpu") -> Stack:
    """A stack whose runs have just ended their first stage."""
    tasks = [Task(config, toy.Memory()) for config in configs]
    stack = Stack(tasks, data, torch.device(device), RunOptions(device=device, trainer="stacked"), None)
    for run in stack.runs:
        run.round = run.first_stage
    return stack


def spoilt_checkpoint(config, data):
    """Where a run stands in its second stage, its new layer filled with NaN."""
    memory = toy.Memory()
    run_stack([Task(config, memory)], data, RunOptions(device="cpu", checkpoint_every=1))
    found = next((c, r) for c, r in memory.saves if "head" in c.tensors)
    found[0].tensors["head"].fill_(torch.nan)
    return found
