"""Own code that goes wrong in a run: one line that names it, and the runs beside it go on."""

from __future__ import annotations

import signal
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import toy
from fedentopt.algorithms import Algorithm, LocalTerms, Mixing
from fedentopt.errors import InputError
from fedentopt.selection import SELECTORS, Candidates, Census, Selector, selector
from fedentopt.simulation.engine import RunOptions, Task, run_stack


class Choosy(Selector):
    """Power of choice among all, which cannot do without losses."""

    needs = frozenset({"candidate_loss"})

    def candidates(self, available=None):
        return Candidates(self.clients)

    def pick(self, available, losses):
        return available[np.argsort(-losses[available])][: self.cohort_size].tolist()


class Failing(Choosy):
    needs = frozenset({"seconds"})

    def pick(self, available, losses):
        return list(range(self.cohort_size))

    def observe(self, observations):
        raise RuntimeError("no idea")


class Greedy(Selector):
    def pick(self, available, losses):
        return available.tolist()


class Naming(Choosy):
    def candidates(self, available=None):
        return list(self.clients)


class Astray(Choosy):
    def candidates(self, available=None):
        return Candidates((77,))


class Forgetful(Selector):
    def pick(self, available, losses):
        return list(range(self.cohort_size))

    def memory(self):
        return {"known": {1: 2.0}}


class Counting(Forgetful):
    def memory(self):
        return {}

    def arrays(self):
        return {"seen": np.arange(3)}


class Later(Forgetful):
    """Has nothing to remember before it has been told of a round."""

    needs = frozenset({"seconds"})

    def observe(self, observations):
        self.total = float(sum(one.seconds for one in observations.values()))

    def memory(self):
        return {"total": self.total}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Failing", "Failing': observe raised RuntimeError: no idea"),
        ("Greedy", "Greedy' selected 6 clients; accepted: at most 3"),
        ("Naming", "Naming': candidates gave list; accepted: Candidates, or None"),
        ("Astray", r"Astray' asks \(77,\); accepted: Candidates whose clients are distinct numbers from 0 to 5"),
        ("Forgetful", "Forgetful' has a memory that JSON does not keep"),
    ],
)
def test_own_selectors_are_named(name: str, words: str) -> None:
    task = Task(toy.config(selector=f"{__name__}:{name}"), toy.Memory())
    with pytest.raises(InputError, match=f"selector: .*{words}"):
        run_stack([task], toy.images(), RunOptions(device="cpu", checkpoint_every=1))


class Odd(Selector):
    needs: Any = frozenset({"candidate_loss", "head"})
    gives: ClassVar[dict[str, object]] = {}

    def pick(self, available, losses):
        return available[: self.cohort_size].tolist()

    def candidates(self, available=None):
        return self.gives.get("candidates")

    def census(self):
        return self.gives.get("census")

    def arrays(self):
        return self.gives.get("arrays", {})


@pytest.mark.parametrize(
    ("hook", "given", "words"),
    [
        (
            "candidates",
            Candidates(None),
            "candidates gave Candidates(ids=None, samples=None); accepted: Candidates, or",
        ),
        ("candidates", Candidates((0, 1), samples=-1), "candidates gave Candidates(ids=(0, 1), samples=-1); accepted:"),
        (
            "candidates",
            Candidates((0, 1), samples=0.5),
            "candidates gave Candidates(ids=(0, 1), samples=0.5); accepted:",
        ),
        ("census", True, "census gave bool; accepted: Census, or None, with epochs a whole"),
        ("census", Census(epochs=1.5), "census gave Census(epochs=1.5, samples=None); accepted: Census, or"),
        ("census", Census(samples=0), "census gave Census(epochs=1, samples=0); accepted: Census, or None"),
        ("arrays", None, "arrays gave 'arrays' of type object; accepted: a mapping from text to arrays of float32 or"),
        ("arrays", {"seen": np.arange(3)}, "arrays gave 'seen' of type int64; accepted: a mapping from text to arrays"),
        ("arrays", {1: np.zeros(3)}, "arrays gave 1 of type float64; accepted: a mapping from text to arrays of"),
        ("needs", 3, "needs 3; accepted: a set of candidate_loss, head"),
    ],
)
def test_what_an_own_selector_gives_is_checked(
    hook: str, given: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Odd, "needs" if hook == "needs" else "gives", given if hook == "needs" else {hook: given})
    task = Task(toy.config(selector=f"{__name__}:Odd"), toy.Memory())
    with pytest.raises(InputError) as refused:
        run_stack([task], toy.images(), RunOptions(device="cpu", checkpoint_every=1))
    assert words in str(refused.value)


@pytest.mark.parametrize("name", ["Forgetful", "Counting"])
def test_what_no_checkpoint_would_keep_is_told_after_the_first_round(name: str) -> None:
    rounds: list[int] = []
    task = Task(toy.config(selector=f"{__name__}:{name}", rounds=3), toy.Memory())
    with pytest.raises(InputError, match=r"has a memory that JSON|arrays gave 'seen' of type int64"):
        run_stack([task], toy.images(), RunOptions(device="cpu"), lambda event: rounds.append(event.round))
    assert rounds == [1]


def test_what_a_selector_remembers_is_asked_for_when_it_has_been_told_of_a_round() -> None:
    (outcome,) = toy.run([toy.config(selector=f"{__name__}:Later", rounds=3)], toy.images())
    assert len(outcome.records) == 3


def test_an_own_selector_that_is_registered_is_still_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets copies, and what it raises is one line, as with one that is named by its import path."""

    class Named(Keeping):
        pass

    monkeypatch.setattr(SELECTORS, "_classes", dict(SELECTORS._classes))
    selector("named", label="Named")(Named)
    data, config = toy.images(90), toy.config(selector="named", partition="dir:0.2", rounds=3)
    (plain,) = toy.run([config], data)
    monkeypatch.setattr(Careless, "hook", "register")
    (changed,) = toy.run([config], data)
    assert [record.entropy for record in changed.records] == [record.entropy for record in plain.records]
    monkeypatch.setattr(Named, "pick", lambda self, available, losses: 1 // 0)
    with pytest.raises(InputError, match="selector: 'named': select raised ZeroDivisionError"):
        toy.run([config], data)


def test_a_diverged_run_whose_selector_asks_lets_the_others_go_on() -> None:
    data = toy.images(90)
    wild = toy.config(selector=f"{__name__}:Choosy", lr=1e30, rounds=5)
    good = toy.config(rounds=5)
    broken, fine = toy.run([wild, good], data)
    assert broken.diverged_round is not None
    assert len(broken.records) == 5
    assert broken.records[-1].clients == broken.records[-2].clients
    assert toy.difference(fine, toy.run([good], data)[0]) == 0


def test_fedexp_is_the_start_until_somebody_has_trained() -> None:
    data = toy.images(90)
    nobody = {"dropout": 1.0, "rounds": 2}
    plain, other = toy.run([toy.config(**nobody), toy.config(algorithm="fedexp", **nobody)], data)
    assert toy.difference(plain, other) == 0


class Ended:
    """A script's handler of SIGTERM that ends the script, and is not called twice; `raise_signal` runs it at once."""

    def __init__(self) -> None:
        self.before = signal.signal(signal.SIGTERM, self.end)

    def end(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(143)


class Terminated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        signal.raise_signal(signal.SIGTERM)
        return gradient


class EndedInTerms(Algorithm):
    def local_terms(self, client):
        signal.raise_signal(signal.SIGTERM)


class EndedInLoss(Algorithm):
    def local_loss(self, model, start, batch, context):
        signal.raise_signal(signal.SIGTERM)


class EndedInGradient(Algorithm):
    def local_loss(self, model, start, batch, context):
        return Terminated.apply(model(batch.x)).sum()


class EndedInPick(Selector):
    def pick(self, available, losses):
        signal.raise_signal(signal.SIGTERM)


def ended_in_factory(num_classes: int) -> None:
    signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("algorithm", "EndedInTerms"),
        ("algorithm", "EndedInLoss"),
        ("algorithm", "EndedInGradient"),
        ("selector", "EndedInPick"),
        ("model", "ended_in_factory"),
    ],
)
def test_a_script_that_ends_on_a_signal_ends_whatever_that_interrupts(part: str, name: str) -> None:
    handler = Ended()
    try:
        with pytest.raises(SystemExit) as ended:
            toy.run([toy.config(**{part: f"{__name__}:{name}"})], toy.images(90), trainer="streams")
    finally:
        signal.signal(signal.SIGTERM, handler.before)
    assert ended.value.code == 143


class Careless:
    hook = ""
    """Which one changes what it is handed."""


class Terms(Careless, Algorithm):
    server_vectors = ("v",)
    keeps_models = True

    def local_terms(self, client):
        terms = LocalTerms(mu=float((client.label_counts == 0).sum()))
        if self.hook == "local_terms":
            client.label_counts[client.label_counts == 0] = 1  # as nobody divides by zero
        return terms

    def local_loss(self, model, start, batch, context):
        loss = torch.nn.functional.cross_entropy(model(batch.x), batch.y)
        if context.previous is not None:
            loss = loss + 0.1 * (context.flat(model) - context.flat(context.previous)).square().sum()
        if self.hook == "local_loss":
            context.label_counts[:] = 1
        return loss

    def judge(self, soft_labels, samples):
        if self.hook == "judge":
            samples[0] = 1
        return range(len(samples))

    def mix(self, round):
        return Mixing(0.25, 0.75 * round.shares)

    def absorb(self, vectors, start, trained, round):
        if self.hook == "absorb":
            trained.sub_(start)
            start.zero_()


class Grouping(Careless, Algorithm):
    def groups(self, label_counts, seed):
        found = label_counts.argmax(1) % 2
        if self.hook == "groups":
            label_counts[:] = 1
        return found


class Keeping(Careless, Selector):
    def register(self, counts, **more):
        super().register(counts, **more)
        if self.hook == "register":
            counts[:] = 1

    def pick(self, available, losses):
        return available[: self.cohort_size].tolist()


@pytest.mark.parametrize("hook", ["local_terms", "local_loss", "judge", "absorb", "groups", "register"])
def test_own_code_may_change_what_it_is_handed(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"groups": {"algorithm": Grouping}, "register": {"selector": Keeping}}.get(hook, {"algorithm": Terms})
    named = {part: f"{__name__}:{cls.__name__}" for part, cls in own.items()}
    data, config = toy.images(90), toy.config(**named, partition="dir:0.2", rounds=4)
    (plain,) = toy.run([config], data)
    monkeypatch.setattr(Careless, "hook", hook)
    (changed,) = toy.run([config], data)
    assert toy.difference(changed, plain) == 0
    assert [record.entropy for record in changed.records] == [record.entropy for record in plain.records]


class Shifting(Careless, Algorithm):
    """Logits shifted by the logarithm of the counts, in an array of its own for every client or in the same for all."""

    def local_terms(self, client):
        if not self.hook:
            return LocalTerms(logit_shift=np.log1p(client.label_counts))
        self.kept = vars(self).get("kept", np.zeros(len(client.label_counts)))
        np.log1p(client.label_counts, out=self.kept)
        return LocalTerms(logit_shift=self.kept)


def test_an_array_that_own_code_gives_again_has_the_numbers_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    data, config = toy.images(90), toy.config(algorithm=f"{__name__}:Shifting", partition="dir:0.2")
    (fresh,) = toy.run([config], data)
    monkeypatch.setattr(Careless, "hook", "local_terms")
    (again,) = toy.run([config], data)
    assert toy.difference(fresh, again) == 0


class Noisy(Algorithm):
    """A local objective with draws of its own."""

    def local_loss(self, model, start, batch, context):
        noise = torch.randn(batch.x.shape, generator=context.generator)
        return torch.nn.functional.cross_entropy(model(batch.x + 0.1 * noise), batch.y)


def test_keyed_draws_in_a_local_objective() -> None:
    data = toy.images(90)
    config = toy.config(algorithm=f"{__name__}:Noisy", clients=6, cohort="4", rounds=3)
    first, second = (toy.run([config], data, workers=workers)[0] for workers in (1, 3))
    assert toy.difference(first, second) == 0
    assert toy.difference(first, toy.run([config.replace(seed=1)], data)[0]) > 0
