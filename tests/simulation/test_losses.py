"""Losses that trainers tell: of training, sample by sample as the steps see them, and of models on clients' data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import straight_line
from fedentopt.simulation.trainers import LoopTrainer, StackedTrainer, StreamsTrainer
from fedentopt.simulation.trainers.client_samples import NARROW, UNLIKE_TRAINING, WIDE, even_blocks, places_of_models
from fedentopt.simulation.trainers.stacked import StepShape
from fedentopt.simulation.trainers.stacked_nets import LoweredNet, VmapNet
from straight_line import BATCH, CLASSES, World, clients, world

KINDS = [
    ("lenet5", "loop"), ("lenet5", "stacked"), ("lenet5", "streams"), ("toy:branching", "loop"),
    ("toy:branching", "stacked"), ("toy:branching", "streams"), ("toy:normed", "loop"), ("toy:normed", "streams"),
    ("toy:dropping", "loop"), ("toy:dropping", "streams"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=KINDS, ids=lambda kind: " ".join(kind))
def case(request: pytest.FixtureRequest) -> World:
    return world(*request.param)


def test_losses_are_those_of_the_plain_logits_over_all_local_steps(case: World) -> None:
    work = case.work(clients(), wants_losses=True)
    models, losses = straight_line.train(case, work)
    trained = case.trainer.train(case.starts, work)
    assert trained.losses is not None
    assert trained.losses.dtype == torch.float32
    torch.testing.assert_close(trained.losses.double(), losses, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(trained.models, models, atol=2e-5, rtol=1e-4)
    # The case was hard: clients of other lengths, terms in the logits of some, losses that differ within a client.
    assert len({*work.steps_host.tolist()}) > 3
    assert (work.logit_scale.amin(1) < 0.8).any()
    assert (work.logit_shift.amin(1) < -1).any()
    assert float((losses[:, 1] - losses[:, 0]).max()) > 1e-3


def test_wanting_losses_changes_no_bit_of_a_model(case: World) -> None:
    rows = clients()
    without, with_ = (case.trainer.train(case.starts, case.work(rows, wants_losses=wanted)) for wanted in (False, True))
    assert without.losses is None
    assert torch.equal(without.models, with_.models)
    again = case.trainer.train(case.starts, case.work(rows, wants_losses=True))
    assert again.losses is not None
    assert with_.losses is not None
    assert torch.equal(again.losses, with_.losses)  # nothing is left of the round before


def test_the_nets_of_these_cases_are_of_every_kind() -> None:
    kinds = {type(made.trainer.net) for kind in KINDS[:6] if isinstance((made := world(*kind)).trainer, StackedTrainer)}
    assert kinds == {LoweredNet, VmapNet}  # WideNet runs in Triton's interpreter: `wide_interpreted.py`
    loop = world("lenet5", "loop").trainer
    assert isinstance(loop, LoopTrainer)
    assert "compiled" in loop.describe()
    assert "modules" in world("lenet5", "loop", compiled=False).trainer.describe()


def test_compiled_and_module_training_tell_the_same_losses() -> None:
    compiled, module = world("lenet5", "loop"), world("lenet5", "loop", compiled=False)
    rows = clients()
    a, b = (w.trainer.train(w.starts, w.work(rows, wants_losses=True)).losses for w in (compiled, module))
    assert a is not None
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("trainer", ["loop", "stacked", "streams"])
def test_losses_by_hand(trainer: str) -> None:
    """A linear layer that always says (0, log 3, 0, 0), never moving: log 6 for class 0, 2 or 3, log 2 for class 1."""
    made = world("toy:linear", trainer)
    bias = torch.tensor([0, math.log(3.0), 0, 0])
    made.starts = made.layout.pack({"1.weight": torch.zeros(CLASSES, 192), "1.bias": bias})[None]
    rows = clients(2, start_row=0, lr=0.0, correction_mode=0, mu=0.0)
    own = [np.array([0, 4, 8]), np.array([1, 5, 2, 9, 13, 3, 17, 21, 25, 29])]  # labels 0 0 0, and seven of ten 1
    rows = [replace(row, task=replace(row.task, samples=s, epochs=2)) for row, s in zip(rows, own, strict=True)]
    work = made.work(rows, wants_losses=True)
    losses = made.trainer.train(made.starts, work).losses
    assert losses is not None
    assert made.data.labels[own[1]].tolist().count(1) == 8
    far, near = math.log(6.0), math.log(2.0)
    rms = math.sqrt((2 * far**2 + 8 * near**2) / 10)
    expected = {0: [far, far], 1: [(2 * far + 8 * near) / 10, rms]}
    for row, source in enumerate(work.source):
        assert losses[row].tolist() == pytest.approx(expected[int(source)], rel=1e-6)


def test_finished_clients_inside_a_replayed_prefix_add_nothing() -> None:
    made = world("toy:branching", "stacked")
    trainer = made.trainer
    assert isinstance(trainer, StackedTrainer)
    work = made.work(clients(), wants_losses=True)
    expected = trainer.train(made.starts, work).losses
    buffers = trainer._buffers
    assert buffers is not None
    buffers.load(work, made.starts)
    trainer._begin(buffers, work.rows)
    for _ in range(int(work.steps_host[0])):
        trainer._step(buffers, StepShape(buffers.room.rows, False, True))  # all rows, finished and empty ones too
    torch.testing.assert_close(work.average_losses(buffers.losses[: work.rows]), expected, atol=1e-6, rtol=1e-5)
    assert (buffers.losses[work.rows :] == 0).all()


@pytest.mark.parametrize("trainer", ["stacked", "streams"])
def test_a_stack_in_parts_tells_the_same_losses(trainer: str) -> None:
    made = world("toy:branching", trainer)
    work = made.work(clients(), wants_losses=True)
    whole = made.trainer.train(made.starts, work).losses
    while made.trainer.shrink():
        parts = made.trainer.train(made.starts, work).losses
        assert parts is not None
        torch.testing.assert_close(parts, whole, atol=1e-6, rtol=1e-5)
    assert work.part(2, 5).wants_losses


@pytest.mark.parametrize(("name", "trainer"), KINDS[:6], ids=str)
def test_a_client_that_diverged_says_so_and_leaves_the_others_alone(name: str, trainer: str) -> None:
    made = world(name, trainer)
    rows = clients()
    rows[1] = replace(rows[1], lr=1e30)
    work = made.work(rows, wants_losses=True)
    sound = made.trainer.train(made.starts, made.work(clients(), wants_losses=True)).losses
    losses = made.trainer.train(made.starts, work).losses
    assert losses is not None
    assert sound is not None
    bad = int(np.flatnonzero(work.source == 1)[0])
    assert not torch.isfinite(losses[bad]).any()
    others = [i for i in range(work.rows) if i != bad]
    torch.testing.assert_close(losses[others], sound[others], atol=1e-6, rtol=1e-5)


OWN = [
    np.arange(17), np.array([3]), np.arange(40, 120), np.array([7, 7, 90]), np.arange(60, 75), np.arange(0, 120, 2),
]  # fmt: skip
ROWS = [2, 0, 0, 1, 2, 0]


def expected_means(case: World, rows: list[int], samples: list[np.ndarray]) -> np.ndarray:
    """In straight-line float64 torch."""
    models = [model.eval() for model in case.models()]
    means = []
    for row, own in zip(rows, samples, strict=True):
        x = case.transform.standardise(case.data.images[own]).double()
        means.append(float(F.cross_entropy(models[row](x).detach(), case.data.labels[own])))
    return np.array(means)


def test_mean_losses_of_models_on_the_data_of_clients(case: World) -> None:
    found = case.trainer.mean_losses(case.starts, ROWS, OWN).read()
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, expected_means(case, ROWS, OWN), rtol=1e-5)
    # In evaluation mode, between rounds of training that must not notice.
    work = case.work(clients())
    before = case.trainer.train(case.starts, work).models
    assert np.array_equal(case.trainer.mean_losses(case.starts, ROWS, OWN).read(), found)
    assert torch.equal(case.trainer.train(case.starts, work).models, before)


def test_mean_losses_of_nobody_and_of_clients_without_samples(case: World) -> None:
    assert case.trainer.mean_losses(case.starts, [], []).read().shape == (0,)
    none = np.zeros(0, dtype=np.int64)
    assert np.isnan(case.trainer.mean_losses(case.starts, [1, 2], [none, none]).read()).all()
    found = case.trainer.mean_losses(case.starts, [1, 2, 0], [none, OWN[0], OWN[1]]).read()
    assert np.isnan(found[0])
    np.testing.assert_allclose(found[1:], expected_means(case, [2, 0], OWN[:2]), rtol=1e-5)


@pytest.mark.parametrize("trainer", ["loop", "streams"])
@pytest.mark.parametrize("name", ["lenet5", "toy:normed"])
def test_on_the_cpu_a_mean_loss_does_not_depend_on_neighbours(name: str, trainer: str) -> None:
    made = world(name, trainer, workers=2)
    together = made.trainer.mean_losses(made.starts, ROWS, OWN).read()
    for i, (row, own) in enumerate(zip(ROWS, OWN, strict=True)):
        assert made.trainer.mean_losses(made.starts[row : row + 1], [0], [own]).read()[0] == together[i]


def test_the_stack_takes_many_clients_in_few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = world("lenet5", "stacked")
    trainer = made.trainer
    assert isinstance(trainer, StackedTrainer)
    passes: list[tuple[int, ...]] = []
    logits = trainer.net.logits
    monkeypatch.setattr(
        trainer.net, "logits", lambda rows, x: passes.append((len(rows), *x.shape[:2])) or logits(rows, x)
    )
    many = [np.arange(k % 7, k % 7 + 20) for k in range(90)]
    rows = [k % 3 for k in range(90)]
    found = trainer.mean_losses(made.starts, rows, many).read()
    np.testing.assert_allclose(found, expected_means(made, rows, many), rtol=1e-5)
    assert passes == [(3, 3, 640)]  # thirty clients of twenty samples per model
    monkeypatch.setattr("fedentopt.simulation.trainers.stacked.PREDICT_PIXELS", 128 * 32 * 32)
    np.testing.assert_allclose(trainer.mean_losses(made.starts, rows, many).read(), found, rtol=1e-5)
    assert max(n * columns for n, _, columns in passes[1:]) <= 128


def test_the_streams_take_the_clients_of_a_model_together_on_cuda_only(monkeypatch: pytest.MonkeyPatch) -> None:
    made = world("toy:normed", "streams")
    assert isinstance(made.trainer, StreamsTrainer)
    sizes: list[int] = []
    logits = made.trainer._logits
    monkeypatch.setattr(made.trainer, "_logits", lambda bound, x: sizes.append(len(x)) or logits(bound, x))
    made.trainer.mean_losses(made.starts, ROWS, OWN).read()
    assert sizes == [len(own) for own in OWN]


@settings(deadline=None)
@given(st.lists(st.integers(0, 3000), max_size=12), st.integers(50, 5000), st.sampled_from([NARROW, UNLIKE_TRAINING]))
def test_blocks_hold_every_place_once_and_little_else(lengths: list[int], room: int, narrow: int) -> None:
    lengths.sort(reverse=True)
    lines = np.split(np.random.default_rng(0).permutation(sum(lengths)), np.cumsum(lengths)[:-1]) if lengths else []
    blocks = list(even_blocks(lines, room, narrow))
    kept = [block.places for block in blocks]
    for block in blocks:
        assert block.places.size <= room
        for line, places in zip(lines[block.lines], block.places, strict=True):
            assert np.isin(places[places >= 0], line).all()
    held = np.concatenate([np.zeros(0, dtype=np.int64), *(p[p >= 0] for p in kept)])
    assert sorted(held) == list(range(sum(lengths)))
    if room >= narrow:
        assert sum(p.size for p in kept) - sum(lengths) < narrow * max(1, len(lengths))
    assert all(p.shape[1] <= WIDE for p in kept)


def test_samples_are_grouped_by_model_largest_first() -> None:
    found = places_of_models([4, 1, 4], [np.array([9, 9]), np.array([5, 6, 7]), np.array([8, 8])])
    assert {row: line.tolist() for row, line in found.items()} == {4: [0, 1, 5, 6], 1: [2, 3, 4]}
    assert list(found) == [4, 1]
    assert BATCH < NARROW
