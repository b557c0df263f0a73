"""Own algorithms and selectors whose hooks are misspelt, or cannot be called: refused before anything runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import toy
from fedentopt.algorithms import ALGORITHMS, Algorithm, FedProx, LocalTerms, setting
from fedentopt.algorithms.algorithm import HOOKS
from fedentopt.errors import InputError
from fedentopt.selection import SELECTORS, Candidates, Selector
from fedentopt.selection.own_selectors import DECLARED, WRITTEN, check_own_selector
from fedentopt.simulation import compare
from fedentopt.simulation.methods import check_algorithm

M = __name__


class Misspelt(Algorithm):
    """FedProx, if `local_terms` were written so."""

    def local_term(self, client: Any) -> LocalTerms:
        return LocalTerms(mu=1.0)


class First(Selector):
    """The first clients, always."""

    def pick(self, available: np.ndarray, losses: np.ndarray | None) -> list[int]:
        return available[: self.cohort_size].tolist()


class Deaf(First):
    """Needs the loss, and would never hear of it."""

    needs = frozenset({"loss"})

    def observ(self, observations: Any) -> None:
        self.heard = observations


def algorithm(**attributes: Any) -> Algorithm:
    made: Algorithm = type("Odd", (Algorithm,), attributes)()
    return made


def selector(**attributes: Any) -> Selector:
    made: Selector = type("Odd", (First,), attributes)(2)
    return made


def method(*_: Any) -> None:
    """Any method."""


@pytest.mark.parametrize(
    ("attribute", "hook"),
    [
        ("local_term", "local_terms"),
        ("localTerms", "local_terms"),
        ("local_los", "local_loss"),
        ("mixx", "mix"),
        ("jugde", "judge"),
        ("stpe", "step"),
        ("absrob", "absorb"),
        ("evaluate", "evaluated"),
        ("second_stages", "second_stage"),
        ("server_vector", "server_vectors"),
        ("keep_models", "keeps_models"),
        ("read_label_counts", "reads_label_counts"),
    ],
)
def test_a_near_miss_of_an_algorithms_hook_is_refused(attribute, hook):
    with pytest.raises(InputError) as caught:
        check_algorithm(algorithm(**{attribute: method}), "my:Odd")
    told = f"has {attribute}, which nothing reads; accepted: {hook}, or _{attribute} for a helper"
    assert str(caught.value) == f"algorithm: 'my:Odd' {told}"


@pytest.mark.parametrize(
    ("attribute", "hook"),
    [
        ("observ", "observe"),
        ("candidate", "candidates"),
        ("need", "needs"),
        ("forget_client", "forget_clients"),
        ("rememeber", "remember"),
        ("reads_labels_counts", "reads_label_counts"),
        ("load_array", "load_arrays"),
    ],
)
def test_a_near_miss_of_a_selectors_hook_is_refused(attribute, hook):
    with pytest.raises(InputError) as caught:
        check_own_selector(selector(**{attribute: method}), "my:Odd")
    told = f"has {attribute}, which nothing reads; accepted: {hook}, or _{attribute} for a helper"
    assert str(caught.value) == f"selector: 'my:Odd' {told}"


@pytest.mark.parametrize("given", [f"{M}:Misspelt", f"fedavg+{M}:Deaf", Misspelt, Misspelt(), Deaf])
def test_they_are_refused_however_a_run_is_asked_for(given):
    with pytest.raises(InputError, match=r"which nothing reads; accepted: (local_terms|observe), or _"):
        compare([given], dataset="digits", clients=5, cohort=2, rounds=1, epochs=1, seeds=1)


class Brings(Algorithm):
    """Its own draw has the mistake."""

    own_selector = Deaf


def test_they_are_refused_in_the_selector_that_an_algorithm_brings():
    with pytest.raises(InputError, match="selector: 'Deaf' has observ, which nothing reads"):
        toy.run([toy.config(algorithm=f"{M}:Brings")], toy.images())


def test_they_are_refused_in_what_a_user_has_registered(monkeypatch):
    for registry, kind, settings in (
        (ALGORITHMS, Misspelt, {"algorithm": "mine"}),
        (SELECTORS, Deaf, {"selector": "mine"}),
    ):
        monkeypatch.setattr(registry, "_classes", {**registry._classes, "mine": kind})
        with pytest.raises(InputError, match=r"'mine' has (local_term|observ), which nothing reads"):
            toy.run([toy.config(**settings)], toy.images())
        monkeypatch.undo()


def test_they_are_refused_in_a_base_and_in_a_mixin():
    class Mixin:
        def local_term(self, client: Any) -> None: ...

    for bases in ((Misspelt,), (Mixin, Algorithm), (Mixin, FedProx)):
        with pytest.raises(InputError, match="has local_term, which nothing reads"):
            check_algorithm(type("Odd", bases, {})(), "my:Odd")


class Helpful(Algorithm):
    """Public names near those of hooks, and each for a good reason."""

    steps: int = setting(3, help="a setting", low=1)
    labels = ("a", "b")
    names = ("c", "d")

    def mix(self, round: Any) -> Any:
        return super().mix(self.mixx(round))

    def mixx(self, round: Any) -> Any:
        """Beside a `mix` of its own."""
        return round

    def local_terms(self, client: Any) -> LocalTerms:
        return LocalTerms(mu=self.group(client))

    def group(self, client: Any) -> float:
        """Named by a function above, as a helper is."""
        return 0.1

    def local_steps(self) -> int:
        return self.steps

    def pushed(self) -> None: ...
    def initialise(self) -> None: ...
    def mixing(self) -> None: ...


def test_helpers_keep_their_names():
    assert isinstance(check_algorithm(Helpful(), "my:Helpful"), Helpful)
    asked = Candidates((1,))
    own = selector(candidate=method, candidates=lambda self, available=None: asked, pool=method, labels=(1,), scores=2)
    check_own_selector(own, "my:Odd")
    assert own.candidates() is asked


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inner(self: Any, *arguments: Any) -> Any:
        return function(self)

    return inner


class Decorated(Algorithm):
    """Helpers that only what is decorated calls."""

    steps = 3

    @logged
    def absorb(self) -> int:
        return self.pushs()

    def pushs(self) -> int:
        return 1

    @property
    def keeps_models(self) -> bool:
        return self.steps > 3

    @functools.cached_property
    def groupss(self) -> float:
        return self.mixx

    mixx = 0.1

    @functools.lru_cache  # noqa: B019
    def local_terms(self, client: Any) -> LocalTerms:
        return LocalTerms(mu=self.groupss)


def test_helpers_that_decorated_functions_and_properties_call_keep_their_names():
    assert isinstance(check_algorithm(Decorated(), "my:Decorated"), Decorated)


def test_what_is_built_in_is_not_looked_at():
    for cls in ALGORITHMS:
        assert check_algorithm(cls(), cls.name).name == cls.name
    for kind in SELECTORS:
        check_own_selector(kind(2), kind.name)


@pytest.mark.parametrize(
    ("hook", "written", "told"),
    [
        ("local_terms", lambda self: None, "(too many positional arguments); accepted: local_terms(client)"),
        ("mix", lambda self, round, more: None, "(missing a required argument: 'more'); accepted: mix(round)"),
        ("step", lambda self, server, start, trained: None, "accepted: step(server, start, trained, shares)"),
        ("local_loss", lambda model, batch: None, "accepted: local_loss(model, start, batch, context)"),
        (
            "push",
            lambda self, vectors, *, more: None,
            "argument: 'more'); accepted: push(vectors)",
        ),  # Python's words vary
    ],
)
def test_a_hook_that_cannot_be_called_as_it_is_is_refused(hook, written, told):
    with pytest.raises(InputError) as caught:
        check_algorithm(algorithm(**{hook: written}), "my:Odd")
    assert str(caught.value).startswith(f"algorithm: 'my:Odd': {hook} cannot be called as it is (")
    assert str(caught.value).endswith(told)


@pytest.mark.parametrize(
    ("hook", "written", "told"),
    [
        ("pick", lambda self, available: [], "(too many positional arguments); accepted: pick(available, losses)"),
        ("observe", lambda self: None, "(too many positional arguments); accepted: observe(observations)"),
        ("memory", lambda self, more: {}, "(missing a required argument: 'more'); accepted: memory()"),
        ("expect", lambda self, told: None, "accepted: a class method expect(told)"),
    ],
)
def test_a_selectors_hook_that_cannot_be_called_as_it_is_is_refused(hook, written, told):
    with pytest.raises(InputError) as caught:
        check_own_selector(selector(**{hook: written}), "my:Odd")
    assert str(caught.value).startswith(f"selector: 'my:Odd': {hook} cannot be called as it is (")
    assert str(caught.value).endswith(told)


def test_a_hook_of_the_wrong_kind_is_refused():
    for attribute, written, told in [
        ("vectors_start_as_network", method, "is a method; accepted: a value, or a property"),
        ("keeps_models", classmethod(method), "is a method; accepted: a value, or a property"),
        ("step", 0.1, "is no method; accepted: a method step(server, start, trained, shares)"),
        ("mix", property(method), "is no method; accepted: a method mix(round)"),
    ]:
        with pytest.raises(InputError) as caught:
            check_algorithm(algorithm(**{attribute: written}), "my:Odd")
        assert str(caught.value) == f"algorithm: 'my:Odd': {attribute} {told}"

    class Taken(Algorithm):
        step: float = setting(0.1, help="a name that is a hook's")

    class Kept(First):
        memory: int = setting(3, help="a name that is a hook's")

    with pytest.raises(InputError, match="'my:Odd': step is a setting; accepted: a method step"):
        check_algorithm(Taken(), "my:Odd")
    with pytest.raises(InputError, match=r"'my:Odd': memory is a setting; accepted: a method memory\(\)"):
        check_own_selector(Kept(2), "my:Odd")


def halved(client: Any) -> LocalTerms:
    return LocalTerms(mu=0.5)


@pytest.mark.parametrize("kind", [Algorithm, FedProx, Helpful])
def test_a_hook_on_an_object_which_nothing_would_call_is_refused(kind):
    made = kind()
    made.step = halved
    with pytest.raises(InputError) as caught:
        compare([made], dataset="digits", clients=5, cohort=2, rounds=1, epochs=1, seeds=1)
    told = "has step on the object, where nothing reads it; accepted: a class with a method step(server, start, trained"
    assert told in str(caught.value)


def test_a_built_in_algorithm_with_a_hook_on_the_object_is_not_trained_as_if_it_had_none():
    made = FedProx(mu=0.1)
    made.local_terms = halved
    with pytest.raises(InputError, match=r"'fedprox' has local_terms on the object, .* a method local_terms\(client\)"):
        compare([made], dataset="digits", clients=5, cohort=2, rounds=1, epochs=1, seeds=1)


def test_what_is_read_from_an_object_may_stand_there():
    class Remembering(Helpful):
        def __init__(self) -> None:
            super().__init__()
            self.server_vectors = ("before",)
            self.local_terms = functools.lru_cache(self.local_terms)  # of a method that its class has

    class RememberingOurs(FedProx):
        def __init__(self) -> None:
            super().__init__()
            self.local_terms = functools.lru_cache(self.local_terms)  # of a method that its class inherits from ours

    assert check_algorithm(Remembering(), "my:Remembering").server_vectors == ("before",)
    assert check_algorithm(RememberingOurs(), "my:RememberingOurs").mu == FedProx().mu
    own = First(2)
    own.pick = lambda available, losses: [0, 1]  # selectors are asked themselves
    check_own_selector(own, "my:First")
    own.expect = lambda told: None
    with pytest.raises(InputError, match="'my:First' has expect on the object, where nothing reads it"):
        check_own_selector(own, "my:First")


def test_other_ways_to_write_a_hook_that_can_be_called_pass():
    for written in (
        lambda self, client, more=1: LocalTerms(),
        lambda self, *arguments: LocalTerms(),
        staticmethod(lambda client: LocalTerms()),
        classmethod(lambda cls, anybody: LocalTerms()),
        logged(lambda self: LocalTerms()),
        functools.partialmethod(lambda self, strength, client: LocalTerms(mu=strength), 0.1),
        functools.singledispatchmethod(lambda self, client: LocalTerms()),
    ):
        made = algorithm(local_terms=written)
        assert check_algorithm(made, "my:Odd") is made
    assert check_algorithm(algorithm(push_enters="after"), "my:Odd").push_enters == "after"
    rounds = classmethod(lambda cls, *, cohort_size, clients, seed, rounds, **settings: cls(cohort_size, seed))
    check_own_selector(selector(for_run=rounds), "my:Odd")


def test_every_public_name_of_the_contracts_is_a_hook_or_known_not_to_be_one():
    read = {"clients", "round", "num_classes", "counts", "sizes", "rng", "numbers_of", "by_number", "cohort"}
    called = {"register", "update", "remove", "select", "falls_short", "state_dict", "load_state_dict"}
    public = {name for name in vars(Selector) if not name.startswith("_")}
    assert public - {"label"} == {*DECLARED, *WRITTEN} | read | called | {"available_numbers"}
    assert {"local_terms", "mix", "step", "own_selector", "push_enters"} <= set(HOOKS)
    assert not {"name", "label"} & set(HOOKS)


def test_flower_and_nvflare_refuse_them_too():
    pytest.importorskip("flwr")
    from fedentopt.flower.options import make_selector as for_flower

    with pytest.raises(InputError, match="selector: 'Deaf' has observ, which nothing reads; accepted: observe"):
        for_flower(Deaf(2), 2, 3, 0, 0, None, "fifo")
    pytest.importorskip("nvflare")
    from fedentopt.nvflare.options import make_selector as for_nvflare

    with pytest.raises(InputError, match=f"selector: '{M}:Deaf' has observ, which nothing reads; accepted: observe"):
        for_nvflare(2, 3, 0, 0, None, f"{M}:Deaf", None)
