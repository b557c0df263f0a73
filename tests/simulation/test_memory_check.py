"""Stacks that cannot fit on their device are refused before they begin."""

from __future__ import annotations

import re

import pytest
import torch

import toy
from fedentopt.errors import InputError
from fedentopt.simulation import engine
from fedentopt.simulation.engine import RunOptions, Task, run_stack
from fedentopt.simulation.layout import FlatLayout
from fedentopt.simulation.memory_check import LeastMemory, check_memory, least_memory
from fedentopt.simulation.methods import build_algorithm, build_selector
from fedentopt.simulation.run_state import RunState

WIDTH = 580  # floats of the linear model in a row: 3 x 192 weights, 3 biases and one of padding
GB = 10**9


@pytest.mark.parametrize(
    ("method", "rows", "server"),
    [
        ({"algorithm": "fedavg"}, 0, 0),
        ({"algorithm": "fedadam"}, 0, 2),
        ({"algorithm": "scaffold"}, 1, 1),
        ({"algorithm": "moon"}, 1, 0),
        ({"selector": "clustered-update"}, 1, 0),
        ({"algorithm": "scaffold", "selector": "clustered-update"}, 2, 1),
        ({"selector": "divfl"}, 0, 0),  # is told heads, and keeps them itself
    ],
    ids=str,
)
def test_what_is_counted_is_what_a_run_holds(method, rows, server):
    config, model, data = toy.config(clients=7, **method), toy.linear(3), toy.images(samples=70)
    algorithm, layout = build_algorithm(config), FlatLayout(model)
    selector = build_selector(config, algorithm)
    least = least_memory(config, algorithm, selector, layout)
    assert least.rows == rows
    assert least.remembers == 4 * WIDTH * (7 * rows + server)
    assert least.models == 4 * WIDTH * (2 + 3 // 2)
    run = RunState(
        config, toy.Memory(), data.y_train, 3, model, layout, torch.device("cpu"), algorithm, selector,
    )  # fmt: skip
    held = [*run.memory.client_rows.values(), *run.memory.server_rows.values()]
    assert sum(tensor.nbytes for tensor in held) == least.remembers


def test_the_refusal_says_how_many_would_fit():
    large = LeastMemory("clustered-update", 100, 1, 4 * GB, GB // 2)
    small = LeastMemory("fedavg", 100, 0, 0, GB // 2)
    check_memory([large] * 30 + [small] * 10, 140 * GB, "a device")  # exactly what there is
    with pytest.raises(
        InputError, match=r"^memory: 41 runs together cannot fit on a device, at least 144.5 GB for 140.0 GB"
    ) as error:
        check_memory([small] * 10 + [large] * 31, 140 * GB, "a device")
    said = str(error.value)
    assert "clustered-update alone remembers 4.0 GB per run (1 times the parameters for each of 100 clients)" in said
    fit = int(re.search(r"--max-stack (\d+)", said)[1])
    assert fit == 32  # the 31 large ones and a small one: no other 32 of them take more
    check_memory([large] * 31 + [small], 140 * GB, "a device")


def test_where_not_even_one_fits_smaller_stacks_are_no_advice():
    with pytest.raises(InputError, match=r"1 run cannot fit .*accepted: a device with more memory") as error:
        check_memory([LeastMemory("scaffold", 1000, 1, 300 * GB, GB)], 140 * GB, "a device")
    assert "--max-stack" not in str(error.value)
    with pytest.raises(InputError) as error:
        check_memory([LeastMemory("fedavg", 1000, 0, 0, 150 * GB)], 140 * GB, "a device")
    assert "remembers" not in str(error.value)


def test_a_stack_that_cannot_fit_begins_no_run(monkeypatch):
    configs = [toy.config(selector="clustered-update", seed=seed) for seed in (0, 1)]
    need = 4 * WIDTH * (6 + 3)
    tasks = [Task(config, toy.Memory()) for config in configs]
    monkeypatch.setattr(engine, "free_memory", lambda device: 2 * need - 1)
    with pytest.raises(InputError, match=r"memory: 2 runs together .*at most 1 of these runs .*--max-stack 1"):
        run_stack(tasks, toy.images(), RunOptions(device="cpu"))
    assert not any(hasattr(task.recorder, "begun") for task in tasks)
    monkeypatch.setattr(engine, "free_memory", lambda device: 2 * need)
    assert len(run_stack(tasks, toy.images(), RunOptions(device="cpu"))) == 2
