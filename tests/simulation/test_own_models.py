"""An own model that goes wrong only while it trains: one line with its place; what is not the model's passes."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn

import toy
from command_line import commander
from fedentopt.algorithms import Algorithm
from fedentopt.errors import InputError
from fedentopt.models import build
from fedentopt.simulation.engine import RunOptions, Task, run_stack
from fedentopt.simulation.trainers import loop

command = pytest.fixture(commander)


class Raising(nn.Module):
    """Takes the two images of the trial; refuses, with what it was made with, any other batch while it trains."""

    def __init__(self, num_classes: int, error: BaseException) -> None:
        super().__init__()
        self.layer, self.error = nn.Linear(3 * 8 * 8, num_classes), error

    def forward(self, x):
        if self.training and len(x) != 2:
            raise self.error  # the line that is named
        return self.layer(x.flatten(1))


LINE = next(n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if "# the line that" in line)


def picky(num_classes):
    return Raising(num_classes, ValueError("two images\nonly"))


def leaving(num_classes):
    return Raising(num_classes, SystemExit(0))


def at_its_end(num_classes):
    return Raising(num_classes, StopIteration())


class Noisy(Raising):
    def forward(self, x):
        return super().forward(x + torch.randn_like(x) if self.training else x)


def noisy(num_classes):
    return Noisy(num_classes, ValueError("two images\nonly"))


class OnlyInEvaluation(Raising):
    def forward(self, x):
        if not self.training and len(x) != 2:
            raise self.error
        return self.layer(x.flatten(1))


def only_in_evaluation(num_classes):
    return OnlyInEvaluation(num_classes, KeyError("k"))


class NoWayBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("no way back")


class OneWay(Raising):
    def forward(self, x):
        return NoWayBack.apply(self.layer(x.flatten(1)))


def one_way(num_classes):
    return OneWay(num_classes, RuntimeError())


class InPlace(Raising):
    def forward(self, x):
        return self.layer(x.flatten(1)).exp().mul_(2)  # exp needs its output for the way back


def in_place(num_classes):
    return InPlace(num_classes, RuntimeError())


def in_pairs(num_classes):
    """No line of the user's runs in it; its second layer refuses batches of an odd number."""
    return nn.Sequential(
        nn.Flatten(), nn.Unflatten(0, (-1, 2)), nn.Flatten(0, 1), nn.Dropout(0.1), nn.Linear(3 * 8 * 8, num_classes)
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("picky", rf"raised ValueError: two images, in Raising\.forward \(.*test_own_models\.py, line {LINE}\)$"),
        ("leaving", rf"raised SystemExit: 0, in Raising\.forward \(.*test_own_models\.py, line {LINE}\)$"),
        ("at_its_end", rf"raised StopIteration: , in Raising\.forward \(.*test_own_models\.py, line {LINE}\)$"),
        ("noisy", rf"raised ValueError: two images, in Raising\.forward \(.*test_own_models\.py, line {LINE}\)$"),
        ("only_in_evaluation", r"raised KeyError: 'k', in OnlyInEvaluation\.forward \("),
        ("one_way", r"raised RuntimeError: no way back, in NoWayBack\.backward \("),
        ("in_place", r"raised RuntimeError: .* modified by an inplace operation.*, in its backward pass$"),
    ],
)
@pytest.mark.parametrize("trainer", ["loop", "streams"])
def test_what_an_own_model_raises_in_training_is_one_line_with_its_place(name, words, trainer):
    config = toy.config(model=f"{__name__}:{name}")
    with pytest.raises(InputError, match=f"^model: {__name__}:{name} {words}") as refused:
        toy.run([config], toy.images(samples=90), trainer=trainer)
    assert "\n" not in str(refused.value)
    assert isinstance(refused.value.__cause__, BaseException)
    assert type(refused.value.__cause__).__name__ in str(refused.value)


class WithMore(nn.Module):
    """As networks with an auxiliary classifier: something else in training than in evaluation."""

    def __init__(self, num_classes: int, *, pair: bool) -> None:
        super().__init__()
        self.layer, self.more, self.pair = nn.Linear(3 * 8 * 8, num_classes), nn.Linear(3 * 8 * 8, 2), pair

    def forward(self, x):
        logits, more = self.layer(x.flatten(1)), self.more(x.flatten(1))
        if not self.training:
            return logits
        return (logits, more) if self.pair else torch.cat([logits, more], dim=1)


def a_pair(num_classes):
    return WithMore(num_classes, pair=True)


def too_wide(num_classes):
    return WithMore(num_classes, pair=False)


class FirstOfPair(Algorithm):
    def local_loss(self, model, start, batch, context):
        logits, _ = model(batch.x)
        return nn.functional.cross_entropy(logits, batch.y)


@pytest.mark.parametrize(("name", "got"), [("a_pair", "tuple"), ("too_wide", r"\(2, 5\)")])
def test_more_than_logits_in_training_is_for_a_methods_own_loss(name, got):
    config = toy.config(model=f"{__name__}:{name}")
    with pytest.raises(
        InputError, match=rf"{name} gives {got} for two images while it trains; accepted: one row of 3 logits"
    ):
        toy.run([config], toy.images(samples=90))
    if name == "a_pair":
        (outcome,) = toy.run([config.replace(algorithm=f"{__name__}:FirstOfPair")], toy.images(samples=90))
        assert outcome.diverged_round is None


class Clipped(Raising):
    """Keeps its weights small: in place, or by other tensors in the place of those that are averaged."""

    def __init__(self, num_classes: int, *, in_place: bool) -> None:
        super().__init__(num_classes, RuntimeError())
        self.in_place = in_place

    def forward(self, x):
        weight = self.layer.weight
        if self.in_place:
            weight.data.clamp_(-0.05, 0.05)
        else:
            weight.data = weight.data.clamp(-0.05, 0.05)
        return self.layer(x.flatten(1))


def clipped(num_classes):
    return Clipped(num_classes, in_place=True)


def clipped_aside(num_classes):
    return Clipped(num_classes, in_place=False)


def test_a_forward_that_puts_other_tensors_in_place_of_its_weights_is_refused():
    with pytest.raises(
        InputError, match=r"clipped_aside puts other tensors in the place of layer\.weight .*; accepted: "
    ):
        toy.run([toy.config(model=f"{__name__}:clipped_aside")], toy.images(samples=90))
    (outcome,) = toy.run([toy.config(model=f"{__name__}:clipped")], toy.images(samples=90))
    assert len(outcome.records) == 3


def test_where_no_line_is_the_users_the_layer_is_named():
    with pytest.raises(InputError, match=r"in_pairs raised RuntimeError: .*, in its layer Unflatten$"):
        toy.run([toy.config(model=f"{__name__}:in_pairs")], toy.images(samples=90))


def test_a_factory_that_is_an_object_ends_no_process_either():
    def factory(num_classes):
        raise SystemExit(0)

    task = Task(toy.config(model=f"{__name__}:factory"), toy.Memory(), model=factory)
    with pytest.raises(InputError, match=r"model: calling .*:factory raised SystemExit: 0"):
        run_stack([task], toy.images(samples=90), RunOptions(device="cpu"))


def test_exceptions_of_our_own_code_pass_as_they_are(monkeypatch):
    def wrong(*arguments, **settings):
        raise ValueError("ours")

    def ours(function):
        return type(function)(function.__code__, {**function.__globals__, "__name__": loop.__name__})

    monkeypatch.setattr(loop, "sgd_step", ours(wrong))
    with pytest.raises(ValueError, match=r"^ours$") as raised:
        toy.run([toy.config(model="toy:branching")], toy.images(samples=90))
    assert not isinstance(raised.value, InputError)


class Signalled(Raising):
    left: ClassVar[list[int]] = []  # one signal: a second would come when the handler is gone

    def forward(self, x):
        if self.training and len(x) != 2 and self.left:
            self.left.pop()
            signal.raise_signal(signal.SIGTERM)
        return self.layer(x.flatten(1))


def signalled(num_classes):
    return Signalled(num_classes, RuntimeError())


@pytest.mark.parametrize("trainer", ["loop", "streams"])
@pytest.mark.parametrize("raised", [SystemExit(143), TimeoutError("too long")])
def test_what_a_handler_of_signals_raises_is_not_the_models(trainer, raised):
    """A script that ends itself on SIGTERM, or after some time, does so whatever the signal happens to interrupt."""

    class Handler:
        def stop(self, number, frame):
            raise raised

    Signalled.left = [1]
    before = signal.signal(signal.SIGTERM, Handler().stop)
    try:
        with pytest.raises(type(raised)) as caught:
            toy.run([toy.config(model=f"{__name__}:signalled")], toy.images(samples=90), trainer=trainer)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert caught.value is raised


class SignalledWhere(nn.Module):
    """A signal reaches it in one of the places where a model is tried when it is built."""

    def __init__(self, num_classes, where):
        super().__init__()
        self.where = where
        self.layer = nn.Linear(3 * 64, num_classes, dtype=torch.float64 if where == "float" else None)
        if where == "factory":
            signal.raise_signal(signal.SIGTERM)

    def reset_parameters(self):
        if self.where == "reset":
            signal.raise_signal(signal.SIGTERM)

    def forward(self, x):
        single = self.layer.weight.dtype == torch.float32
        if self.where == ("training" if self.training else "evaluation") or (self.where == "float" and single):
            signal.raise_signal(signal.SIGTERM)
        return self.layer(x.flatten(1).to(self.layer.weight.dtype))


@pytest.mark.parametrize("where", ["factory", "evaluation", "training", "float", "reset"])
def test_what_a_handler_of_signals_raises_is_not_the_models_while_it_is_built(where):
    raised = TimeoutError("too long")

    class Handler:
        def stop(self, number, frame):
            raise raised

    before = signal.signal(signal.SIGTERM, Handler().stop)
    try:
        with pytest.raises(TimeoutError) as caught:
            build(
                "own:model", 3, seed=0, image_size=8, initialisation="layers",
                factory=lambda classes: SignalledWhere(classes, where),
            )  # fmt: skip
    finally:
        signal.signal(signal.SIGTERM, before)
    assert caught.value is raised


def test_what_somebody_who_listens_raises_is_not_the_models():
    def listen(event):
        raise KeyError("mine")

    task = Task(toy.config(model="toy:branching"), toy.Memory())
    with pytest.raises(KeyError, match="mine"):
        run_stack([task], toy.images(samples=90), RunOptions(device="cpu"), listen)


@pytest.mark.parametrize(
    ("module", "line", "told"),
    [
        ("odd_in_training", "raise ValueError('odd')", "ValueError: odd"),
        ("left_in_training", "sys.exit()", "SystemExit: "),
    ],
)
def test_on_the_command_line_it_is_one_line_and_code_2(module, line, told, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(f"{module}.py").write_text(
        "import sys\nfrom torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self, classes):\n"
        "        super().__init__()\n"
        "        self.last = nn.Linear(3 * 64, classes)\n"
        "    def forward(self, x):\n"
        "        if self.training and len(x) != 2:\n"
        f"            {line}\n"
        "        return self.last(x.flatten(1))\n"
    )
    said = command(
        "run", "--dataset", "digits", "--image-size", 8, "--model", f"{module}:Net", "--clients", 6,
        "--cohort", 3, "--rounds", 1, "--device", "cpu", "--workers", 1, "--out", "out",
    )  # fmt: skip
    assert said.code == 2
    assert f"model: {module}:Net raised {told}" in said.err
    assert f"in Net.forward ({module}.py, line 9)" in said.err
    assert "Traceback" not in said.err
