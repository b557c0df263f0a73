"""Slots of the streams trainer serve one client after another: nothing of the one before may reach the next.

The loop trainer is the reference: it has no buffers that outlive a client but the model and the momentum.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import toy
from fedentopt.models import build
from fedentopt.randomness import GOLDEN, mix64
from fedentopt.simulation.augment import ImageTransform
from fedentopt.simulation.device import DeviceData
from fedentopt.simulation.layout import FlatLayout
from fedentopt.simulation.planning import ClientWork
from fedentopt.simulation.trainers.bound_model import BoundModel
from fedentopt.simulation.trainers.loop import LoopTrainer
from fedentopt.simulation.trainers.packed_rows import RowFormat
from fedentopt.simulation.trainers.stream_slot import BatchForm, Slot
from fedentopt.simulation.trainers.streams import StreamsTrainer
from fedentopt.simulation.triton import PlainKernels
from fedentopt.simulation.work import LocalCode, Row, Work, build_work

CPU = torch.device("cpu")
CLASSES = 3


def client(k: int, size: int, epochs: int, batch: int, **settings: object) -> Row:
    """Client k with `size` samples, some of them its neighbours'."""
    base: dict[str, object] = {
        "task": ClientWork(k, (7 * k + np.arange(size)) % 90, np.ones(CLASSES), epochs, batch), "start_row": 0,
        "order_key": 100 + k, "augment_key": (200 + k) << 40, "dropout_key": (300 + k) << 50, "lr": 0.05,
        "weight_decay": 0.01, "momentum": 0.9, "mu": 0.0, "logit_scale": None, "logit_shift": None,
    }  # fmt: skip
    return Row(**(base | settings))  # type: ignore[arg-type]


class Pair:
    """The same model under both trainers, the streams one with few slots."""

    def __init__(self, name: str, slots: int = 2) -> None:
        data = toy.images(samples=90)
        model = build(name, CLASSES, seed=5, image_size=8)
        self.layout = FlatLayout(model)
        place, transform = DeviceData.place(data, CPU), ImageTransform(data.mean, data.std, 0.2, 0.5, 0.1)
        self.loop = LoopTrainer(model, self.layout, place, transform, 1)
        self.streams = StreamsTrainer(model, self.layout, place, transform, PlainKernels(), slots)
        rows = [self.layout.pack(build(name, CLASSES, seed=s, image_size=8).state_dict()) for s in (5, 6, 7)]
        self.starts = torch.stack(rows)

    def check(self, rows: list[Row], batch: int, correction: torch.Tensor | None = None, starts: int = 3) -> Work:
        """Train the rows in both ways, from the first `starts` models: the same results, and all of them moved."""
        work = build_work(rows, batch, CLASSES, CPU, correction)
        trained = self.streams.train(self.starts[:starts], work).models
        torch.testing.assert_close(trained, self.loop.train(self.starts[:starts], work).models, atol=2e-5, rtol=1e-4)
        moved = (trained - self.starts[work.start_row])[:, : self.layout.parameter_width].abs().amax(1)
        assert (moved > 1e-4).all()
        return work


@pytest.fixture(params=["toy:normed", "toy:branching"])
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(request.param)


def test_many_clients_of_different_lengths_share_few_slots(pair):
    rng = np.random.default_rng(0)
    rows = [client(k, int(rng.integers(1, 30)), int(rng.integers(1, 4)), 8) for k in range(25)]
    work = pair.check(rows, 8, starts=1)
    assert len(pair.streams._slots) == 2
    assert len(set(work.steps_host.tolist())) > 5
    assert max(work.steps_host) > 8  # longer than one visit


def test_clients_that_follow_each_other_in_a_slot_start_from_models_of_their_own(pair):
    pair.check([client(k, 12, 2, 8, start_row=k % 3, lr=0.02 * (1 + k), mu=0.2 * (k % 2)) for k in range(9)], 8)


def test_a_later_round_may_have_longer_clients_and_a_longer_one_shorter(pair):
    for epochs in (1, 40, 3):  # forty epochs of three steps are more than a slot has room for at first
        pair.check([client(k, 20, epochs if k == 1 else 1, 8, lr=0.01) for k in range(5)], 8, starts=1)
    assert pair.streams._slots[0].form.steps >= 120


def test_batch_sizes_may_change_from_round_to_round(pair):
    for batch in (8, 5, 16, 8):
        pair.check([client(k, 4 + 3 * k, 2, batch) for k in range(6)], batch)


def test_corrections_of_some_clients_stay_with_them(pair):
    generator = torch.Generator().manual_seed(1)
    modes = [0, 1, 2, 0, 1, 0, 2, 0]
    correction = 0.3 * torch.randn(4, pair.layout.parameter_width, generator=generator)
    rows = [client(k, 10 + k, 2, 8, correction_mode=mode) for k, mode in enumerate(modes)]
    corrected = pair.check(rows, 8, correction)
    plain = replace(corrected, correction_mode=torch.zeros_like(corrected.correction_mode))
    with_, without = (pair.streams.train(pair.starts, work).models for work in (corrected, plain))
    changed = (with_ - without).abs().amax(1) > 1e-3
    assert changed.tolist() == [modes[source] != 0 for source in corrected.source]
    # A round without corrections after one with them: what a slot still holds of them must not count.
    pair.check([client(k, 10 + k, 2, 8) for k in range(8)], 8)


def test_terms_of_the_loss_are_each_clients_own(pair):
    rng = np.random.default_rng(2)
    rows = [
        client(
            k, 14, 2, 8, logit_scale=rng.uniform(0.5, 2, CLASSES) if k % 2 else None,
            logit_shift=rng.normal(size=CLASSES) if k % 3 else None,
        )
        for k in range(7)
    ]  # fmt: skip
    work = pair.check(rows, 8)
    neutral = replace(
        work, logit_scale=torch.ones_like(work.logit_scale), logit_shift=torch.zeros_like(work.logit_shift)
    )
    gaps = (
        (pair.streams.train(pair.starts, work).models - pair.streams.train(pair.starts, neutral).models).abs().amax(1)
    )
    assert (gaps > 1e-4).tolist() == [bool(s % 2 or s % 3) for s in work.source]


def test_a_client_that_diverged_leaves_nothing_behind(pair):
    rows = [client(k, 24 - k, 2, 8, lr=1e20 if k == 0 else 0.05) for k in range(6)]
    work = build_work(rows, 8, CLASSES, CPU)
    trained = pair.streams.train(pair.starts, work).models
    sound = torch.isfinite(trained).all(1)
    assert sound.tolist() == [source != 0 for source in work.source]
    rest = build_work(rows[1:], 8, CLASSES, CPU)
    assert torch.equal(trained[1:], pair.streams.train(pair.starts, rest).models)


class Streams:
    """CUDA's streams on paper: which one is current, and who waits for whom."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.caller = self.current = FakeStream()
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(self, "current", stream))

    def give(self, monkeypatch: pytest.MonkeyPatch, slots: list[Slot]) -> list[tuple[Slot, str]]:
        """Streams to the slots, and graphs that run the step they stand for; returns the log of their steps."""
        log: list[tuple[Slot, str]] = []
        step, load = Slot._step, Slot.load

        def taken(slot: Slot, what: str) -> None:
            assert slot.stream is self.current
            assert self.caller in slot.stream.waits_for
            log.append((slot, what))

        class FakeGraph:
            def __init__(self, slot: Slot, batch: BatchForm) -> None:
                self.slot, self.batch = slot, batch

            def replay(self) -> None:
                taken(self.slot, "replay")
                step(self.slot, self.batch)

        monkeypatch.setattr(Slot, "_capture", lambda slot, batch: FakeGraph(slot, batch))
        monkeypatch.setattr(Slot, "_step", lambda slot, batch: (taken(slot, "step"), step(slot, batch)))
        monkeypatch.setattr(Slot, "load", lambda slot, client: (taken(slot, "load"), load(slot, client)))
        for slot in slots:
            slot.stream = FakeStream()  # type: ignore[assignment]
        return log


class FakeStream:
    def __init__(self) -> None:
        self.waits_for: list[FakeStream] = []

    def record_event(self) -> FakeStream:
        return self

    def wait_event(self, event: FakeStream) -> None:
        self.waits_for.append(event)

    def wait_stream(self, stream: FakeStream) -> None:
        self.waits_for.append(stream)

    def synchronize(self) -> None:
        pass


def test_every_slot_works_on_its_own_stream_and_in_turn(pair, monkeypatch):
    rows = [client(k, 20 if k < 4 else 8, 5 if k < 4 else 1, 8) for k in range(8)]
    work = build_work(rows, 8, CLASSES, CPU)
    expected = pair.streams.train(pair.starts, work).models
    streams = Streams(monkeypatch)
    log = streams.give(monkeypatch, pair.streams._slots)
    assert torch.equal(pair.streams.train(pair.starts, work).models, expected)
    assert streams.current is streams.caller
    assert streams.caller.waits_for == [slot.stream for slot in pair.streams._slots]
    # BatchNorm runs the last batch of an epoch (four samples of twenty) at its own size, outside the graph.
    eager = sum(what == "step" for _, what in log)
    assert eager == (20 if pair.streams.sees_padding else 0)
    assert sum(what == "replay" for _, what in log) == 4 * 15 + 4 - eager
    # After its first eight steps a slot is left for the other, which has not begun yet.
    turns = [slot for i, (slot, _) in enumerate(log) if i == 0 or log[i - 1][0] is not slot]
    first, second = pair.streams._slots
    assert turns[:4] == [first, second, first, second]
    assert [slot for slot, _ in log[:10]] == [first] * 9 + [second]


def test_padded_batches_are_replayed_in_graphs_of_few_sizes(monkeypatch):
    pair = Pair("toy:normed")
    rows = [client(k, 17 + k, 2, 16) for k in range(8)]  # last batches of 1 to 8 samples
    work = build_work(rows, 16, CLASSES, CPU)
    expected = pair.streams.train(pair.starts, work).models
    pair.streams.close()
    pair.streams.masks = True
    padded = pair.streams.train(pair.starts, work).models
    torch.testing.assert_close(padded, expected, atol=2e-5, rtol=1e-4)
    streams = Streams(monkeypatch)
    log = streams.give(monkeypatch, pair.streams._slots)
    assert torch.equal(pair.streams.train(pair.starts, work).models, padded)
    assert sum(what == "replay" for _, what in log) == 8 * 4
    assert not any(what == "step" for _, what in log)
    sizes = {batch for slot in pair.streams._slots for batch, _ in slot.graphs}
    assert sizes == {BatchForm(16), *(BatchForm(size, masked=True) for size in (2, 4, 6, 8))}


def test_clients_with_code_run_outside_graphs_at_their_real_sizes(pair, monkeypatch):
    sizes: list[int] = []

    def loss(model, start, batch, context):
        sizes.append(len(batch.x))
        return nn.functional.cross_entropy(model(batch.x), batch.y)

    rows = [client(k, 20, 2, 8) for k in range(4)]
    plain = build_work(rows, 8, CLASSES, CPU)
    expected = pair.streams.train(pair.starts, plain).models
    streams = Streams(monkeypatch)
    log = streams.give(monkeypatch, pair.streams._slots)
    code = LocalCode(loss, "mine", 0, 1, np.ones(CLASSES), {}, None)
    work = build_work([replace(row, code=code if k < 2 else None) for k, row in enumerate(rows)], 8, CLASSES, CPU)
    torch.testing.assert_close(pair.streams.train(pair.starts, work).models, expected, atol=1e-6, rtol=1e-5)
    assert sorted(sizes) == [4] * 4 + [8] * 8
    assert sum(what == "replay" for _, what in log) == 2 * (4 if pair.streams.sees_padding else 6)


@pytest.mark.parametrize(("model", "captured"), [("odd_models:deciding", False), ("odd_models:viewing", True)])
def test_a_model_whose_numbers_reach_python_runs_outside_graphs(model, captured, monkeypatch):
    pair = Pair(model)
    work = build_work([client(k, 20, 2, 8) for k in range(4)], 8, CLASSES, CPU)
    expected = pair.streams.train(pair.starts, work).models
    log = Streams(monkeypatch).give(monkeypatch, pair.streams._slots)
    assert torch.equal(pair.streams.train(pair.starts, work).models, expected)
    assert any(what == "replay" for _, what in log) is captured


def test_a_round_that_wants_losses_has_a_graph_of_its_own(pair, monkeypatch):
    rows = [client(k, 16, 1, 8) for k in range(4)]
    with_, without = (build_work(rows, 8, CLASSES, CPU, wants_losses=wanted) for wanted in (True, False))
    expected = pair.streams.train(pair.starts, with_)
    streams = Streams(monkeypatch)
    streams.give(monkeypatch, pair.streams._slots)
    for work in (without, with_, without, with_):
        trained = pair.streams.train(pair.starts, work)
        assert torch.equal(trained.models, expected.models)
        assert trained.losses is None or torch.equal(trained.losses, expected.losses)
    whole = BatchForm(8)
    assert all(set(slot.graphs) == {(whole, False), (whole, True)} for slot in pair.streams._slots)


def test_a_round_that_fails_is_joined_before_its_memory_goes(pair, monkeypatch):
    work = build_work([client(k, 20, 2, 8) for k in range(4)], 8, CLASSES, CPU)
    pair.streams.train(pair.starts, work)
    streams = Streams(monkeypatch)
    streams.give(monkeypatch, pair.streams._slots)

    def fail(slot: Slot, batch: BatchForm) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Slot, "_capture", fail)
    with pytest.raises(torch.OutOfMemoryError):
        pair.streams.train(pair.starts, work)
    assert streams.current is streams.caller
    assert streams.caller.waits_for == [slot.stream for slot in pair.streams._slots]


def test_training_does_not_depend_on_the_number_of_slots():
    rows = [client(k, 5 + 2 * k, 2, 8, start_row=k % 3) for k in range(9)]
    work = build_work(rows, 8, CLASSES, CPU)
    one, four = (Pair("toy:normed", slots) for slots in (1, 4))
    assert torch.equal(one.streams.train(one.starts, work).models, four.streams.train(four.starts, work).models)


def test_prediction_between_rounds_leaves_training_alone(pair):
    rows = [client(k, 11 + k, 2, 8) for k in range(4)]
    work = build_work(rows, 8, CLASSES, CPU)
    before = pair.streams.train(pair.starts, work).models
    pair.streams.predict(pair.starts, pair.streams.data.test_images)
    assert torch.equal(pair.streams.train(pair.starts, work).models, before)


def test_prediction_in_parts_of_bounded_size(pair, monkeypatch):
    images = pair.streams.data.test_images
    whole = pair.streams.predict(pair.starts, images)
    logits = BoundModel.logits
    for pixels, least, parts in [(7 * 64, 1, [7, 7, 7, 7, 2]), (7 * 64, 12, [12, 12, 6]), (64 * 64, 12, [30])]:
        seen: list[int] = []
        monkeypatch.setattr("fedentopt.simulation.trainers.streams.PREDICT_PIXELS", pixels)
        monkeypatch.setattr("fedentopt.simulation.trainers.streams.PREDICT_BATCH", least)
        monkeypatch.setattr(BoundModel, "logits", lambda self, x, seen=seen: seen.append(len(x)) or logits(self, x))
        torch.testing.assert_close(pair.streams.predict(pair.starts, images), whole, atol=1e-5, rtol=1e-5)
        assert seen == parts * 3
    assert whole.shape == (3, 30, CLASSES)


def test_reserved_room_is_made_at_once():
    pair = Pair("toy:branching")
    work = build_work([client(0, 8, 1, 8)], 8, CLASSES, CPU)
    pair.streams.reserve(replace(work.room(1), steps=500))
    pair.check([client(0, 8, 1, 8)], 8)
    assert pair.streams._slots[0].form.steps == 500


def test_packed_rows_hold_every_number_of_the_work_at_aligned_places():
    rng = np.random.default_rng(3)
    rows = [
        client(
            k, 3 + k, 2, 5, lr=float(rng.uniform()), mu=float(rng.uniform()), momentum=float(rng.uniform()),
            logit_scale=rng.uniform(size=CLASSES), logit_shift=rng.normal(size=CLASSES), correction_mode=k % 3,
            augment_key=int(rng.integers(1 << 63)) * 2 + 1, dropout_key=int(rng.integers(1 << 63)) * 2,
        )
        for k in range(4)
    ]  # fmt: skip
    work = build_work(rows, 5, CLASSES, CPU, torch.zeros(2, 1))
    form = RowFormat(work.index.shape[0] + 3, 5, CLASSES)
    packed = form.pack(work)
    fields = form.views(packed)
    assert (fields.pop("step") == 0).all()
    for i, source in enumerate(work.source):
        with np.errstate(over="ignore"):
            counter = np.uint64(rows[source].dropout_key) + np.arange(form.steps, dtype=np.uint64) * np.uint64(GOLDEN)
        assert fields["dropout_keys"][i].tolist() == mix64(counter).astype(np.int64).tolist()
    assert torch.equal(fields["index"][: len(work.index)], work.index)
    for name in fields.keys() - {"dropout_keys", "index"}:
        value = getattr(work, name)
        assert fields[name].dtype == value.dtype
        assert torch.equal(fields[name], value), name
    for field in fields.values():
        assert field.data_ptr() % 16 == packed.data_ptr() % 16


def test_a_format_holds_work_of_its_batch_size_and_classes_with_no_more_steps():
    work = build_work([client(0, 20, 2, 8)], 8, CLASSES, CPU)
    for steps, batch, classes, fits in [
        (6, 8, 3, True),
        (9, 8, 3, True),
        (5, 8, 3, False),
        (6, 9, 3, False),
        (6, 8, 4, False),
    ]:
        assert RowFormat(steps, batch, classes).holds(work) is fits


class Counting(nn.Module):
    """Integer buffers of several types and shapes, each moved by its own rule."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.arange(16, dtype=torch.int32).view(2, 2, 2, 2))
        self.register_buffer("on", torch.tensor([True, False, True]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(len(x))
        self.table.add_(1)
        return self.norm(self.layer(x))


@pytest.mark.parametrize("channels_last", [False, True])
def test_whole_numbers_travel_through_rows_in_every_type_and_shape(channels_last):
    model = Counting()
    layout = FlatLayout(model, channels_last=channels_last)
    start = layout.pack(model.state_dict())
    bound = BoundModel(model, layout, CPU)
    out = torch.empty(layout.width)
    for _ in range(2):  # the second time the numbers begin anew
        bound.load(start)
        bound.module.train()
        for _ in range(3):
            bound.module(torch.randn(5, 2))
        bound.store(out)
        state = layout.unpack(out)
        assert int(state["seen"]) == 15
        assert int(state["norm.num_batches_tracked"]) == 3
        assert torch.equal(state["table"], torch.arange(3, 19, dtype=torch.int32).view(2, 2, 2, 2))
        assert state["on"].tolist() == [True, False, True]
        assert {name: value.dtype for name, value in bound.module.state_dict().items()} == {
            name: value.dtype for name, value in model.state_dict().items()
        }
    assert int(model.seen) == 0  # the model it was made from is left alone


def test_algorithms_are_tuned_for_whole_batches_only(monkeypatch):
    pair = Pair("toy:normed")  # BatchNorm: a last batch has a size of its own
    seen: dict[int, set[bool]] = {}
    step = Slot._step

    def noting(slot: Slot, batch: BatchForm) -> None:
        seen.setdefault(batch.size, set()).add(torch.backends.cudnn.benchmark)
        step(slot, batch)

    monkeypatch.setattr(Slot, "_step", noting)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    pair.check([client(k, size, 2, 8) for k, size in enumerate((20, 16, 5))], 8)
    assert seen == {8: {True}, 4: {False}, 5: {False}}
    assert torch.backends.cudnn.benchmark


def test_silu_behind_batch_norm_writes_elsewhere_where_nobody_else_sees_its_input():
    """The same numbers, without the copy that autograd makes of an input that is overwritten."""
    shared = nn.SiLU(inplace=True)
    net = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.SiLU(inplace=True)),
        nn.Sequential(nn.Conv2d(4, 4, 1), nn.SiLU(inplace=True)),
        nn.Sequential(nn.BatchNorm2d(4), shared, nn.BatchNorm2d(4), shared),
    )
    bound = BoundModel(net, FlatLayout(net), CPU)
    assert [layer.inplace for layer in bound.module.modules() if isinstance(layer, nn.SiLU)] == [False, True, True]
    assert [layer.inplace for layer in net.modules() if isinstance(layer, nn.SiLU)] == [True] * 3
    bound.load(bound.layout.pack(net.state_dict()))
    x = torch.randn(2, 3, 5, 5)
    assert torch.equal(bound.module.train()(x), net.train()(x))
