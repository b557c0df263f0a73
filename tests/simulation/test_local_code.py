"""Local objectives that are code: built-in ones written as such, what the code is shown, what it may do wrong."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import straight_line
from fedentopt.algorithms import local_code
from fedentopt.algorithms.local_code import Batch, LocalContext
from fedentopt.errors import InputError
from fedentopt.models import build
from fedentopt.randomness import GOLDEN, mix64_torch, signed
from fedentopt.simulation.trainers import LoopTrainer, StreamsTrainer
from fedentopt.simulation.trainers.bound_model import BoundModel
from fedentopt.simulation.triton import PlainKernels
from fedentopt.simulation.work import LocalCode, Row, build_work
from straight_line import BATCH, CLASSES, World, clients, world

Loss = Callable[[nn.Module, nn.Module, Batch, LocalContext], torch.Tensor]
PLAIN = {"logit_scale": None, "logit_shift": None}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["loop", "streams"])
def trainer(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["toy:branching", "toy:normed", "toy:dropping", "lenet5"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def code(loss: Loss, k: int = 0, **settings: object) -> LocalCode:
    base: dict[str, object] = {
        "loss": loss, "method": "mine", "client": k, "round": 4, "label_counts": np.arange(CLASSES) + k, "vectors": {},
        "previous": None,
    }  # fmt: skip
    return LocalCode(**(base | settings))  # type: ignore[arg-type]


def cross_entropy(model: nn.Module, start: nn.Module, batch: Batch, context: LocalContext) -> torch.Tensor:
    return F.cross_entropy(model(batch.x), batch.y)


def proximal(model: nn.Module, start: nn.Module, batch: Batch, context: LocalContext) -> torch.Tensor:
    pairs = zip(model.parameters(), start.parameters(), strict=True)
    return F.cross_entropy(model(batch.x), batch.y) + 0.15 * sum(((p - s) ** 2).sum() for p, s in pairs)


def models_of(made: World, rows: list[Row]) -> torch.Tensor:
    return made.trainer.train(made.starts, made.work(rows)).models


def test_cross_entropy_as_code_is_the_built_in_one(name: str, trainer: str) -> None:
    """With momentum, weight decay, proximal term and pushes, which code leaves to the step."""
    made = world(name, trainer, compiled=False)
    built_in = models_of(made, clients(**PLAIN))
    as_code = models_of(made, clients(**PLAIN, code=lambda k: code(cross_entropy, k)))
    if trainer == "loop":
        assert torch.equal(as_code, built_in)
    torch.testing.assert_close(as_code, built_in, atol=1e-6, rtol=1e-5)
    reference, _ = straight_line.train(made, made.work(clients(**PLAIN)))
    torch.testing.assert_close(as_code, reference, atol=2e-5, rtol=1e-4)


def test_fedprox_as_code_is_its_term(name: str, trainer: str) -> None:
    made = world(name, trainer)
    rows = clients(**PLAIN, mu=0.3)
    as_code = [replace(row, mu=0.0, code=code(proximal, k)) for k, row in enumerate(rows)]
    plain = [replace(row, mu=0.0) for row in rows]
    found = models_of(made, as_code)
    torch.testing.assert_close(found, models_of(made, rows), atol=2e-6, rtol=1e-4)
    assert float((found - models_of(made, plain)).abs().max()) > 1e-4


def test_logit_terms_are_the_codes_own_business(trainer: str) -> None:
    made = world("toy:branching", trainer)
    shift = np.array([0.0, -2.0, 1.0, 0.5])

    def calibrated(model: nn.Module, start: nn.Module, batch: Batch, context: LocalContext) -> torch.Tensor:
        return F.cross_entropy(model(batch.x) + torch.tensor(shift).float(), batch.y)

    rows = clients(logit_scale=None, logit_shift=shift)
    built_in = models_of(made, rows)
    for own in (shift, None):  # a row's own shift is not applied a second time
        as_code = [replace(row, logit_shift=own, code=code(calibrated, k)) for k, row in enumerate(rows)]
        torch.testing.assert_close(models_of(made, as_code), built_in, atol=1e-6, rtol=1e-5)


def test_clients_with_and_without_code_share_a_round(name: str, trainer: str) -> None:
    made = world(name, trainer)
    rows = clients()
    some = [replace(row, code=code(proximal, k)) if k % 2 else row for k, row in enumerate(rows)]
    work = made.work(some)
    assert work.has_code
    assert [c.client if c else None for c in work.codes] == [s if s % 2 else None for s in work.source]
    assert not made.work(rows).has_code
    mixed, plain = made.trainer.train(made.starts, work).models, models_of(made, rows)
    every = models_of(made, [replace(row, code=code(proximal, k)) for k, row in enumerate(rows)])
    for row, source in enumerate(work.source):
        assert torch.equal(mixed[row], every[row] if source % 2 else plain[row])


def test_bits_do_not_depend_on_workers_or_slots(trainer: str) -> None:
    one = world("toy:normed", trainer)
    rows = clients(9, code=lambda k: code(proximal, k) if k % 4 else None)
    other = world("toy:normed", trainer, workers=2)
    if isinstance(other.trainer, StreamsTrainer):
        other.trainer._room = 5
    assert torch.equal(models_of(one, rows), models_of(other, rows))


def test_under_bf16_code_runs_as_the_built_in_forward_does(trainer: str) -> None:
    made = world("toy:branching", trainer)
    data, model = made.data, build("toy:branching", CLASSES, seed=5, image_size=8)
    layout = made.layout
    if trainer == "loop":
        made.trainer = LoopTrainer(model, layout, data, made.transform, 1, "bf16")
    else:
        made.trainer = StreamsTrainer(model, layout, data, made.transform, PlainKernels(bf16=True), 1, "bf16")
    kinds: set[torch.dtype] = set()

    def seen(model: nn.Module, start: nn.Module, batch: Batch, context: LocalContext) -> torch.Tensor:
        kinds.update([model(batch.x).dtype, start(batch.x).dtype])
        assert context.features(model, batch.x).dtype == torch.float32
        return cross_entropy(model, start, batch, context)

    rows = clients(4, **PLAIN)
    as_code = [replace(row, code=code(seen, k)) for k, row in enumerate(rows)]
    torch.testing.assert_close(models_of(made, as_code), models_of(made, rows), atol=1e-6, rtol=1e-5)
    assert kinds == {torch.bfloat16}


# What the code is shown.


def test_what_the_code_is_shown(trainer: str) -> None:
    made = world("toy:normed", trainer)
    rows = clients(3, correction_mode=0, **PLAIN)
    vectors = {"own": torch.randn(made.layout.parameter_width)}
    previous = made.starts[(torch.tensor([1, 2, 0]),)] * 0.5
    seen: dict[int, list[tuple[int, int]]] = {}

    def look(model: nn.Module, start: nn.Module, batch: Batch, context: LocalContext) -> torch.Tensor:
        row = rows[context.client]
        first = context.client not in seen
        seen.setdefault(context.client, []).append((len(batch.x), len(batch.y)))
        assert context.round == 4
        assert context.lr == np.float32(row.lr)
        assert context.label_counts.tolist() == (np.arange(CLASSES) + context.client).tolist()
        assert context.vectors["own"] is vectors["own"]
        assert model.training
        assert all(layer.training for layer in model.modules())
        assert batch.x.shape[1:] == (3, 8, 8)
        assert batch.y.dtype == torch.int64
        assert set(batch.y.tolist()) <= set(made.data.labels[row.task.samples].tolist())
        state = made.layout.unpack(made.starts[row.start_row])
        assert all(torch.equal(value, state[key]) for key, value in start.state_dict().items())
        if first:
            assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
        else:
            assert not torch.equal(model[5].weight, start[5].weight)  # type: ignore[index]
        frozen = [start]
        if context.client == 1:
            assert context.previous is None
        else:
            assert context.previous is not None
            old = made.layout.unpack(previous[context.client])
            assert all(torch.equal(value, old[key]) for key, value in context.previous.state_dict().items())
            frozen.append(context.previous)
        for other in frozen:
            assert not any(layer.training for layer in other.modules())
            assert not any(p.requires_grad for p in other.parameters())
            assert not other(batch.x).requires_grad
        return cross_entropy(model, start, batch, context)

    def own(k: int) -> LocalCode:
        return code(look, k, vectors=vectors, previous=None if k == 1 else previous[k])

    with_code = [replace(row, code=own(k)) for k, row in enumerate(rows)]
    found = models_of(made, with_code)
    torch.testing.assert_close(found, models_of(made, rows), atol=1e-6, rtol=1e-5)
    assert seen == {  # 19 samples once, 40 twice, 8 three times; real samples only
        0: [(8, 8), (8, 8), (3, 3)], 1: [(8, 8)] * 10, 2: [(8, 8)] * 3,
    }  # fmt: skip


def test_the_images_are_the_augmented_ones_of_the_step(trainer: str) -> None:
    made = world("toy:linear", trainer)
    rows = clients(1, **PLAIN)
    work = made.work(rows)
    images: list[torch.Tensor] = []

    def keep(model: nn.Module, start: nn.Module, batch: Batch, context: LocalContext) -> torch.Tensor:
        images.append(batch.x)
        return cross_entropy(model, start, batch, context)

    models_of(made, [replace(rows[0], code=code(keep))])
    for t, x in enumerate(images):
        chosen = work.index[t, 0][work.index[t, 0] >= 0].long()
        keys = mix64_torch(work.augment_key[0] + (t * BATCH + torch.arange(len(chosen))) * signed(GOLDEN))
        torch.testing.assert_close(x, made.transform.augment(made.data.images[chosen], keys))


def test_features_are_what_enters_the_last_linear_layer(trainer: str) -> None:
    """Of all three models; with a gradient for the one that trains, as in MOON."""
    made = world("toy:dropping", trainer)
    rows = clients(3, **PLAIN)
    previous = made.starts[1]
    checked = 0

    def contrast(model: nn.Module, start: nn.Module, batch: Batch, context: LocalContext) -> torch.Tensor:
        nonlocal checked
        assert context.previous is not None
        ours, theirs, old = (context.features(m, batch.x) for m in (model, start, context.previous))
        for m, z in ((model, ours), (start, theirs), (context.previous, old)):
            torch.testing.assert_close(m[:-1](batch.x), z)  # type: ignore[index]
            torch.testing.assert_close(m[-1](z), m(batch.x))  # type: ignore[index]
        assert ours.requires_grad
        assert not theirs.requires_grad
        assert not old.requires_grad
        checked += 1
        near, far = F.cosine_similarity(ours, theirs), F.cosine_similarity(ours, old)
        return cross_entropy(model, start, batch, context) - torch.log_softmax(torch.stack([near, far]), 0)[0].mean()

    moved = models_of(made, [replace(row, code=code(contrast, k, previous=previous)) for k, row in enumerate(rows)])
    assert checked == sum(row.task.steps for row in rows)
    body = slice(0, made.layout.parameters[-2].offset)
    assert float((moved - models_of(made, rows))[:, body].abs().max()) > 1e-4  # the contrast reaches the body


def test_features_of_a_model_whose_last_layer_comes_first(trainer: str) -> None:
    made = world("odd_models:head_first", trainer)

    def look(model: nn.Module, start: nn.Module, batch: Batch, context: LocalContext) -> torch.Tensor:
        z = context.features(model, batch.x)
        assert z.shape[1] == 16
        return F.cross_entropy(model.head(z), batch.y)  # type: ignore[operator]

    rows = clients(3, **PLAIN)
    found = models_of(made, [replace(row, code=code(look, k)) for k, row in enumerate(rows)])
    torch.testing.assert_close(found, models_of(made, rows), atol=1e-6, rtol=1e-5)


# Losses of clients with code.


def through_features(model: nn.Module, start: nn.Module, batch: Batch, context: LocalContext) -> torch.Tensor:
    return F.cross_entropy(model[-1](context.features(model, batch.x)), batch.y)  # type: ignore[index]


def layer_by_layer(model: nn.Module, start: nn.Module, batch: Batch, context: LocalContext) -> torch.Tensor:
    """Never asks the model as a whole."""
    x = batch.x
    for layer in model:  # type: ignore[attr-defined]
        x = layer(x)
    return F.cross_entropy(x, batch.y)


def twice(model: nn.Module, start: nn.Module, batch: Batch, context: LocalContext) -> torch.Tensor:
    """The second time at other weights, as sharpness-aware methods do; the loss told is that of the first."""
    first = F.cross_entropy(model(batch.x), batch.y)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.5)
        model(batch.x)
        for p in model.parameters():
            p.sub_(0.5)
    return first * 1.0


@pytest.mark.parametrize("loss", [cross_entropy, proximal, through_features], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ["toy:linear", "toy:normed", "toy:dropping"])
def test_losses_are_those_of_the_codes_own_pass(name: str, trainer: str, loss: Loss) -> None:
    made = world(name, trainer)
    rows = clients(**PLAIN, mu=0.3)
    mu = 0.0 if loss is proximal else 0.3
    as_code = [replace(row, mu=mu, code=code(loss, k)) for k, row in enumerate(rows)]
    _, losses = straight_line.train(made, made.work(rows))
    told = made.trainer.train(made.starts, made.work(as_code, wants_losses=True))
    assert told.losses is not None
    torch.testing.assert_close(told.losses.double(), losses, atol=2e-5, rtol=2e-5)
    assert torch.equal(told.models, models_of(made, as_code))


def test_terms_that_code_puts_into_the_logits_are_no_part_of_the_losses(trainer: str) -> None:
    made = world("toy:linear", trainer)
    shift = np.array([0.0, -2.0, 1.0, 0.5])

    def calibrated(model: nn.Module, start: nn.Module, batch: Batch, context: LocalContext) -> torch.Tensor:
        logits = model(batch.x)
        logits += torch.tensor(shift).float()  # in place: what the model said is gone
        return F.cross_entropy(logits, batch.y)

    rows = clients(logit_scale=None, logit_shift=shift)
    _, losses = straight_line.train(made, made.work(rows))
    as_code = [replace(row, code=code(calibrated, k)) for k, row in enumerate(rows)]
    told = made.trainer.train(made.starts, made.work(as_code, wants_losses=True)).losses
    assert told is not None
    torch.testing.assert_close(told.double(), losses, atol=2e-5, rtol=2e-5)


def test_only_the_first_pass_counts(trainer: str) -> None:
    made = world("toy:linear", trainer)
    rows = clients(**PLAIN)
    _, losses = straight_line.train(made, made.work(rows))
    as_code = [replace(row, code=code(twice, k)) for k, row in enumerate(rows)]
    told = made.trainer.train(made.starts, made.work(as_code, wants_losses=True)).losses
    assert told is not None
    torch.testing.assert_close(told.double(), losses, atol=1e-4, rtol=1e-4)  # the weights lose digits on their way


@pytest.mark.parametrize("name", ["toy:linear", "toy:normed", "toy:dropping"])
def test_without_a_pass_of_its_own_losses_come_from_one_in_evaluation_mode(name: str, trainer: str) -> None:
    made = world(name, trainer)
    rows = clients(4, **PLAIN)
    as_code = [replace(row, code=code(layer_by_layer, k)) for k, row in enumerate(rows)]
    expected: dict[int, list[torch.Tensor]] = {}

    def noting(model: nn.Module, start: nn.Module, batch: Batch, context: LocalContext) -> torch.Tensor:
        loss = layer_by_layer(model, start, batch, context)
        model.eval()  # after the pass that trains: BatchNorm has taken note of the batch
        with torch.no_grad():
            logits = model.forward(batch.x)  # not seen by hooks
        expected.setdefault(context.client, []).append(F.cross_entropy(logits, batch.y, reduction="none"))
        model.train()
        return loss

    models_of(made, [replace(row, code=code(noting, k)) for k, row in enumerate(rows)])
    work = made.work(as_code, wants_losses=True)
    told = made.trainer.train(made.starts, work)
    assert told.losses is not None
    for row, source in enumerate(work.source):
        every = torch.cat(expected[int(source)])
        wanted = torch.stack([every.mean(), every.square().mean().sqrt()])
        torch.testing.assert_close(told.losses[row], wanted, atol=1e-5, rtol=1e-5)
    assert torch.equal(told.models, models_of(made, as_code))  # statistics included
    torch.testing.assert_close(told.models, models_of(made, rows), atol=1e-6, rtol=1e-5)


# What the code may do wrong.


def returns(value: object) -> Loss:
    def loss(model: nn.Module, start: nn.Module, batch: Batch, context: LocalContext) -> torch.Tensor:
        return value(model, start, batch) if callable(value) else value  # type: ignore[no-any-return, return-value]

    return loss


def raising(model: nn.Module, start: nn.Module, batch: Batch, context: LocalContext) -> torch.Tensor:
    raise KeyError("two\nlines")


class Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.sum()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no way back")


def no_way_back(model: nn.Module, start: nn.Module, batch: Batch, context: LocalContext) -> torch.Tensor:
    return Refusing.apply(model(batch.x))  # type: ignore[no-untyped-call, no-any-return]


ACCEPTED = "; accepted: a scalar tensor that depends on the model"


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (returns(0.5), "local_loss returned float" + ACCEPTED),
        (returns(None), "local_loss returned NoneType" + ACCEPTED),
        (returns(lambda m, s, b: m(b.x)), f"local_loss returned a tensor of shape (8, {CLASSES})" + ACCEPTED),
        (returns(lambda m, s, b: m(b.x).sum()[None]), "local_loss returned a tensor of shape (1,)" + ACCEPTED),
        (
            returns(lambda m, s, b: s(b.x).sum()),
            "local_loss returned a number that does not depend on the model" + ACCEPTED,
        ),
        (raising, "local_loss raised KeyError: 'two\\nlines'"),
        (no_way_back, "the gradient of local_loss raised RuntimeError: no way back"),
    ],
    ids=["float", "none", "logits", "one of many", "of the start", "raises", "no gradient"],
)
def test_what_is_wrong_is_said_in_one_line(trainer: str, loss: Loss, says: str) -> None:
    made = world("toy:branching", trainer)
    with pytest.raises(InputError) as found:
        models_of(made, clients(2, code=lambda k: code(loss, k)))
    assert str(found.value) == f"algorithm: mine: {says}"
    # The trainer is none the worse for it.
    fresh = world("toy:branching", trainer)
    assert torch.equal(models_of(made, clients()), models_of(fresh, clients()))


def doubled(model: nn.Module, start: nn.Module, batch: Batch, context: LocalContext) -> torch.Tensor:
    return F.cross_entropy(model.double()(batch.x.double()), batch.y)


def put_back(model: nn.Module, start: nn.Module, batch: Batch, context: LocalContext) -> torch.Tensor:
    """As some code of SAM does, which keeps a copy of the weights and puts that in their place."""
    loss = F.cross_entropy(model(batch.x), batch.y)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return loss


def replaced(model: nn.Module, start: nn.Module, batch: Batch, context: LocalContext) -> torch.Tensor:
    name, layer = next((name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear))
    model.get_submodule(name).weight = nn.Parameter(layer.weight.detach().clone())
    return F.cross_entropy(model(batch.x), batch.y)


@pytest.mark.parametrize("loss", [doubled, put_back, replaced])
def test_other_parameters_than_those_that_are_averaged_are_refused(trainer: str, loss: Loss) -> None:
    """They would be trained, and nothing of it sent."""
    with pytest.raises(InputError, match=r"mine: local_loss gave the model other parameters, or moved them, as double"):
        models_of(world("toy:branching", trainer), clients(2, code=lambda k: code(loss, k)))


@pytest.mark.parametrize("error", [SystemExit(0), ZeroDivisionError("ours"), InputError("model: no")])
def test_what_a_method_of_ours_raises_passes_unless_a_model_of_ones_own_runs_in_it(
    trainer: str, error: BaseException
) -> None:
    def ends(model: nn.Module, start: nn.Module, batch: Batch, context: LocalContext) -> torch.Tensor:
        raise error

    with pytest.raises(type(error)) as found:
        models_of(world("toy:branching", trainer), clients(2, code=lambda k: code(ends, k, own=None)))
    assert found.value is error
    with pytest.raises(InputError) as told:
        models_of(world("toy:branching", trainer), clients(2, code=lambda k: code(ends, k, own="model: 'a:b'")))
    named = f"model: 'a:b': local_loss of mine raised {type(error).__name__}: {error}"
    assert str(told.value) == (str(error) if isinstance(error, InputError) else named)


def test_a_model_without_a_linear_layer_has_no_features(trainer: str) -> None:
    made = world("odd_models:without_linear", trainer)

    def ask(model: nn.Module, start: nn.Module, batch: Batch, context: LocalContext) -> torch.Tensor:
        return context.features(model, batch.x).sum()

    with pytest.raises(InputError, match=r"algorithm: mine: local_loss raised InputError: model: .* no nn\.Linear"):
        models_of(made, clients(2, code=lambda k: code(ask, k)))


def test_running_out_of_memory_is_no_fault_of_the_code(trainer: str) -> None:
    def greedy(model: nn.Module, start: nn.Module, batch: Batch, context: LocalContext) -> torch.Tensor:
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        models_of(world("toy:linear", trainer), clients(2, code=lambda k: code(greedy, k)))


class Meddling:
    """Everything a careless function might do to the models it is handed."""

    def __init__(self) -> None:
        self.met: set[int] = set()

    def __call__(self, model: nn.Module, start: nn.Module, batch: Batch, context: LocalContext) -> torch.Tensor:
        assert model.training
        loss = F.cross_entropy(model(batch.x), batch.y)
        (3 * F.cross_entropy(model(batch.x), batch.y)).backward()
        model.zero_grad(set_to_none=True)
        model.eval()
        for other in (start, context.previous):
            assert other is not None
            if context.client not in self.met:
                assert not other.training
                assert not any(p.requires_grad for p in other.parameters())
            other.train().requires_grad_(True)
            other(batch.x)  # BatchNorm takes note of it, and nobody else
        self.met.add(context.client)
        return loss


def freezing(model: nn.Module, start: nn.Module, batch: Batch, context: LocalContext) -> torch.Tensor:
    layers = list(model)  # type: ignore[call-overload]
    layers[0].requires_grad_(False)
    layers[1].eval()
    return F.cross_entropy(model(batch.x), batch.y)


def test_what_code_does_to_a_module_ends_with_its_call(trainer: str) -> None:
    made, rows = world("toy:narrow", trainer), clients(**PLAIN)
    fresh = models_of(world("toy:narrow", trainer), rows)

    def meddled() -> list[Row]:
        loss = Meddling()
        own = [code(loss, k, previous=made.starts[0]) if k % 2 else None for k in range(len(rows))]
        return [replace(row, code=c) for row, c in zip(rows, own, strict=True)]

    once = models_of(made, meddled())
    plain = [i for i, source in enumerate(made.work(rows).source) if source % 2 == 0]
    assert torch.equal(once[plain], fresh[plain])
    assert torch.equal(models_of(made, meddled()), once)
    # Two passes per step count twice in BatchNorm's statistics; weights depend on the batch alone, and move.
    width = made.layout.parameter_width
    torch.testing.assert_close(once[:, :width], fresh[:, :width], atol=1e-6, rtol=1e-5)
    frozen = [replace(row, code=code(freezing, k)) for k, row in enumerate(rows)]
    models_of(made, frozen)
    assert torch.equal(models_of(made, rows), fresh)


def test_modules_for_code_are_made_only_where_it_is(trainer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = world("toy:linear", trainer)
    created: list[bool] = []
    init = BoundModel.__init__

    def counting(self: BoundModel, *args: object, trains: bool = True) -> None:
        created.append(trains)
        init(self, *args, trains=trains)  # type: ignore[arg-type]

    models_of(made, clients())
    monkeypatch.setattr(BoundModel, "__init__", counting)
    models_of(made, clients())
    assert not created
    models_of(made, clients(code=lambda k: code(cross_entropy, k)))
    held = 1 if trainer == "loop" else 2  # one per worker or slot
    assert created == [False] * held
    models_of(made, clients(code=lambda k: code(cross_entropy, k, previous=made.starts[0])))
    models_of(made, clients(code=lambda k: code(cross_entropy, k, previous=made.starts[0])))
    assert created == [False] * 2 * held


def test_the_stacked_trainer_refuses_code() -> None:
    made = world("toy:linear", "stacked")
    with pytest.raises(ValueError, match="code"):
        models_of(made, clients(2, code=lambda k: code(cross_entropy, k) if k else None))


def test_a_model_the_compiled_kernels_know_runs_as_a_module_with_code() -> None:
    made = world("lenet5", "loop")
    assert "compiled" in made.trainer.describe()
    calls: list[int] = []

    def noting(model: nn.Module, start: nn.Module, batch: Batch, context: LocalContext) -> torch.Tensor:
        calls.append(context.client)
        return cross_entropy(model, start, batch, context)

    rows = clients(3, **PLAIN)
    found = models_of(made, [replace(row, code=code(noting, k)) for k, row in enumerate(rows)])
    assert len(calls) == sum(row.task.steps for row in rows)
    torch.testing.assert_close(found, models_of(made, rows), atol=2e-6, rtol=1e-4)


def test_parts_of_a_work_keep_their_clients_code() -> None:
    rows = clients(code=lambda k: code(cross_entropy, k) if k % 2 else None)
    work = build_work(rows, BATCH, CLASSES, torch.device("cpu"), torch.zeros(9, 1))
    part = work.part(2, 5)
    assert [c.client if c else None for c in part.codes] == [s if s % 2 else None for s in part.source]
    assert part.lr_host.tolist() == part.lr.tolist()


def test_the_words_of_code_need_no_torch() -> None:
    """`algorithms.local_code` says what a method is called with; reading it must not load torch."""
    tree = ast.parse(Path(local_code.__file__).read_text())
    loaded = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in loaded for alias in node.names} | {getattr(node, "module", "") for node in loaded}
    assert not any(name.startswith(("torch", "fedentopt")) for name in names if name)
    assert Batch._fields == ("x", "y")
