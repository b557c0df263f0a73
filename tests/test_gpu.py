"""On a machine with a GPU: CUDA runs equal CPU runs to float tolerance. Elsewhere these tests are skipped."""

from __future__ import annotations

import pytest
import torch

import toy
from fedentopt.simulation.engine import RunOptions, Task, run_stack
from second_stages import in_second_stage, spoilt_checkpoint
from toy import METHODS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
HARD = {"stragglers": 0.5, "dropout": 0.2, "epochs": 3, "rounds": 4, "lr": 0.02, "precision": "fp32-exact"}


def compare(configs, data, tolerance, **options):
    cpu = toy.run(configs, data, device="cpu")
    gpu = toy.run(configs, data, device="cuda", say=print, **options)
    for config, a, b in zip(configs, cpu, gpu, strict=True):
        assert [r.clients for r in a.records] == [r.clients for r in b.records]
        gap = toy.difference(a, b)
        print(f"{config.model} {config.method}: largest difference {gap:.2e}")
        assert gap < tolerance, config.method


def test_lenet_in_one_stack_for_every_algorithm():
    data = toy.images(samples=300, size=32, classes=10)
    configs = [toy.config(**(HARD | {"model": "lenet5", "clients": 10, "batch_size": 16} | m)) for m in METHODS[:-1]]
    compare(configs, data, 2e-4, trainer="stacked")


def test_fedconcat():
    data = toy.images(samples=300, size=32, classes=10)
    # Sixty rounds let rounding grow; a small learning rate keeps the comparison sharp.
    config = toy.config(**(HARD | {"model": "lenet5", "clients": 10} | METHODS[-1] | {"lr": 1e-3}))
    compare([config], data, 1e-4)


def concat_runs(model):
    """Second stages with other numbers of clusters, other cohorts, other starts, and rounds without anybody."""
    changes = [
        {}, {"seed": 1, "cohort": "6"}, {"seed": 2, "clusters": 3}, {"seed": 3, "cohort": "1"}, {"seed": 4},
        {"seed": 5, "clusters": 3, "concat_share": 0.1, "evaluate_every": 3},
    ]  # fmt: skip
    common = HARD | {"model": model} | METHODS[-1] | {"lr": 1e-3, "concat_share": 0.2}
    return [toy.config(**(common | change)) for change in changes]


@pytest.mark.parametrize(("model", "size"), [("lenet5", 32), ("toy:wide", 8), ("toy:branching", 8), ("toy:normed", 8)])
def test_second_stages_of_many_runs(model, size):
    compare(concat_runs(model), toy.images(samples=120, size=size), 2e-4)


@pytest.mark.parametrize(("model", "size"), [("lenet5", 32), ("toy:wide", 8)])
def test_a_diverged_second_stage_leaves_the_others_alone(model, size):
    data = toy.images(samples=120, size=size)
    bad, *good = concat_runs(model)[:3]
    memory = toy.Memory()
    memory.saved = spoilt_checkpoint(bad, data)
    # Started where the bad run stands, so that they train beside it.
    beside = []
    for config in good:
        straight = toy.Memory()
        run_stack([Task(config, straight)], data, RunOptions(device="cpu", checkpoint_every=1))
        beside.append(toy.Memory())
        beside[-1].saved = next(save for save in straight.saves if "head" in save[0].tensors)
        beside[-1].expected = straight.outcome
    tasks = [Task(c, m) for c, m in zip([bad, *good], [memory, *beside], strict=True)]
    outcomes = run_stack(tasks, data, RunOptions(device="cuda"))
    assert outcomes[0].diverged_round == memory.saved[0].round + 1
    assert outcomes[0].records[-1].accuracy == pytest.approx(100 / 3)
    for outcome, other in zip(outcomes[1:], beside, strict=True):
        assert outcome.diverged_round is None
        assert toy.difference(outcome, other.expected) < 2e-4


def test_a_second_stage_never_waits_for_the_device():
    stack = in_second_stage(concat_runs("lenet5"), toy.images(samples=120, size=32), "cuda")
    for _ in range(2):  # kernels are compiled and test features computed
        stack._tick(stack.runs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        stack._tick(stack.runs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("model", ["toy:linear", "toy:branching"])
def test_other_stacked_models(model):
    configs = [toy.config(**(HARD | {"model": model} | m)) for m in METHODS[:-1]]
    compare(configs, toy.images(samples=90), 1e-4, trainer="stacked")


@pytest.mark.parametrize("model", ["toy:wide", "toy:dropping"])
def test_wide_convolutions(model):
    configs = [toy.config(**(HARD | {"model": model} | m)) for m in METHODS[:-1]]
    compare(configs, toy.images(samples=90), 5e-4, trainer="stacked")


def test_wide_encoders():
    concat = toy.config(**(HARD | {"model": "toy:wide"} | METHODS[-1] | {"lr": 1e-3}))
    compare([concat], toy.images(samples=90), 1e-4)


@pytest.mark.parametrize("model", ["toy:normed", "toy:branching", "toy:dropping"])
def test_streams(model):
    configs = [toy.config(**(HARD | {"model": model} | m)) for m in METHODS[:-1]]
    compare(configs, toy.images(samples=90), 5e-4, trainer="streams")


def test_grey_images_and_augmentation():
    data = toy.images(samples=120, size=32, channels=1)
    compare([toy.config(**(HARD | {"model": "lenet5"}))], data, 2e-4)


def test_a_diverged_run_leaves_the_others_alone():
    data = toy.images(samples=120, size=32)
    good, bad = (toy.config(model="lenet5", rounds=6, precision="fp32-exact", lr=lr) for lr in (0.01, 1e12))
    outcomes = toy.run([good, bad], data, device="cuda")
    assert outcomes[0].diverged_round is None
    assert outcomes[1].diverged_round is not None
    assert toy.difference(outcomes[0], toy.run([good], data, device="cuda")[0]) < 1e-4
    assert outcomes[1].records[-1].accuracy == pytest.approx(100 / 3)


def test_streams_with_more_clients_than_slots_and_a_longer_second_round():
    # Few large clients and many small ones: rounds differ in length, and buffers grow after graphs were captured.
    data = toy.images(samples=1500)
    settings = HARD | {"model": "toy:dropping", "clients": 24, "cohort": "14", "partition": "dir:0.1", "batch_size": 4}
    configs = [toy.config(**(settings | m)) for m in ({"algorithm": "fedavg"}, {"algorithm": "scaffold"})]
    compare(configs, data, 5e-4, trainer="streams")
