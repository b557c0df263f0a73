"""On a machine with a GPU: CUDA runs equal CPU runs to float tolerance. Elsewhere these tests are skipped."""

from __future__ import annotations

import pytest
import torch

import toy
from test_trainers import METHODS

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


@pytest.mark.parametrize("model", ["toy:linear", "toy:branching"])
def test_other_stacked_models(model):
    configs = [toy.config(**(HARD | {"model": model} | m)) for m in METHODS[:-1]]
    compare(configs, toy.images(samples=90), 1e-4, trainer="stacked")


def test_wide_convolutions():
    configs = [toy.config(**(HARD | {"model": "toy:wide"} | m)) for m in METHODS[:-1]]
    compare(configs, toy.images(samples=90), 5e-4)
    concat = toy.config(**(HARD | {"model": "toy:wide"} | METHODS[-1] | {"lr": 1e-3}))
    compare([concat], toy.images(samples=90), 1e-4)


@pytest.mark.parametrize("model", ["toy:normed", "toy:branching"])
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
