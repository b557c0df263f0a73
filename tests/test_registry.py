"""The registry: names, labels, settings and options by one line beside a class; and what is registered today."""

from __future__ import annotations

import numpy as np
import pytest

from fedentopt.algorithms import ALGORITHMS
from fedentopt.errors import InputError
from fedentopt.registry import Registry
from fedentopt.selection import SELECTORS
from fedentopt.settings import Configurable, setting


class Thing(Configurable):
    """What the registry below holds."""


def filled() -> Registry[Thing]:
    things: Registry[Thing] = Registry("thing")

    @things.register("second", label="Second")
    class Second(Thing):
        """The second one,
        on two lines.

        More about it.
        """

        mu: float = setting(0.5, "weight", low=0, high=1, option="second_mu")
        size: int = setting(3, "how many", above=2)

    @things.register("first", label="First")
    class First(Thing):
        """The first one."""

    return things


def test_classes_by_name_in_the_order_of_declaration() -> None:
    things = filled()
    assert things.names == ("second", "first")
    assert [cls.__name__ for cls in things] == ["Second", "First"]
    assert "first" in things
    assert "third" not in things
    second = things.get("second")
    assert (second.name, second.label) == ("second", "Second")
    assert things.label("second") == "Second"
    assert things.label("my.module:Own") == "my.module:Own"
    assert list(things.settings("second")) == ["mu", "size"]
    assert things.settings("first") == {}


def test_unknown_names_are_refused_by_what_there_is() -> None:
    with pytest.raises(InputError) as caught:
        filled().get("third")
    assert str(caught.value) == "thing: 'third' is unknown; accepted: second, first or package.module:factory"


def test_two_of_one_name_are_a_mistake() -> None:
    things = filled()
    with pytest.raises(ValueError, match="two things are called 'first'"):
        things.register("first", label="Another")(type("Another", (Thing,), {}))
    assert things.get("first").__name__ == "First"


def test_options_are_the_settings_that_have_one() -> None:
    options = filled().options()
    assert list(options) == ["second_mu"]
    name, declared = options["second_mu"]
    assert (name, declared.name, declared.default) == ("second", "mu", 0.5)


def test_a_description_for_listings() -> None:
    assert filled().describe() == [
        {
            "name": "second",
            "label": "Second",
            "needs": [],
            "reads_label_counts": False,
            "sizes_only": False,
            "own_weights": False,
            "largest": None,
            "leaves_client": [],
            "about": "The second one, on two lines.",
            "settings": [
                {
                    "name": "mu",
                    "default": 0.5,
                    "help": "weight",
                    "accepted": "at least 0 and at most 1",
                    "option": "second_mu",
                },
                {"name": "size", "default": 3, "help": "how many", "accepted": "above 2", "option": None},
            ],
        },
        {
            "name": "first",
            "label": "First",
            "needs": [],
            "reads_label_counts": False,
            "sizes_only": False,
            "own_weights": False,
            "largest": None,
            "leaves_client": [],
            "about": "The first one.",
            "settings": [],
        },
    ]
    by_name = {entry["name"]: entry for entry in SELECTORS.describe()}
    leaves = {name: entry["leaves_client"] for name, entry in by_name.items()}
    assert (leaves["random"], leaves["fed-cbs"]) == ([], ["label counts"])
    assert leaves["oort"] == ["number of samples", "the loss of its training", "how long it trained"]
    assert leaves["divfl"] == ["its change of the last layer"]
    assert [name for name, entry in by_name.items() if entry["own_weights"]] == [
        "pow-d", "cpow-d", "rpow-d", "hics-fl", "clustered-size", "clustered-update", "clustered-label"
    ]  # fmt: skip
    assert [by_name[name]["reads_label_counts"] for name in ("random", "fedentopt")] == [False, True]


def test_what_is_registered() -> None:
    paper = ("fedavg", "fedprox", "fednova", "scaffold", "fedrs", "fedlc", "fedconcat", "fedentropy")
    assert ALGORITHMS.names[: len(paper)] == paper
    beyond = {
        "fedavgm", "fedadam", "fedyogi", "fedexp", "feddyn", "feddisco", "balanced-softmax", "fedntd", "moon"
    }  # fmt: skip
    assert beyond <= set(ALGORITHMS.names)
    assert SELECTORS.names[:3] == ("random", "fedentopt", "kl")


@pytest.mark.parametrize("registry", [ALGORITHMS, SELECTORS], ids=lambda registry: registry.kind)
def test_every_method_says_what_it_is_and_what_its_settings_do(registry) -> None:
    labels = [registry.label(name) for name in registry.names]
    assert len(set(labels)) == len(labels)
    options = list(registry.options())
    assert len(options) == sum(
        s.option is not None for name in registry.names for s in registry.settings(name).values()
    )
    for entry in registry.describe():
        assert entry["about"].endswith("."), entry["name"]
        assert not entry["about"].startswith(f"{registry.get(entry['name']).__name__}("), "a docstring of its own"
        for one in entry["settings"]:
            assert one["help"], (entry["name"], one["name"])
            assert registry.settings(entry["name"])[one["name"]].check(one["default"]) == one["default"]


def test_the_defaults_are_the_published_ones() -> None:
    defaults = {
        name: {one.name: one.default for one in ALGORITHMS.settings(name).values()} for name in ALGORITHMS.names
    }
    assert defaults["fedprox"] == {"mu": 1e-4}
    assert defaults["fedrs"] == {"alpha": 0.5, "soft": False}
    assert defaults["fedlc"] == {"tau": 1.0}
    assert defaults["scaffold"] == {"variant": "niid", "start": "zero", "divisor": "clients"}
    assert defaults["fednova"] == {"normaliser": "momentum"}
    assert defaults["fedconcat"] == {"clusters": 5, "share": 0.9, "max_rounds": 500}
    assert defaults["fedavgm"] == {"beta": 0.9, "server_lr": 1.0}
    assert defaults["fedadam"] == defaults["fedyogi"] == {"server_lr": 0.01, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3}
    assert defaults["fedexp"] == {"eps": 1e-3}
    assert defaults["feddyn"] == {"alpha": 0.01}
    assert defaults["feddisco"] == {"a": 0.5, "b": 0.1}
    assert defaults["balanced-softmax"] == {"floor": 1e-3}
    assert defaults["fedntd"] == {"beta": 1.0, "tau": 1.0}
    assert defaults["moon"] == {"mu": 1.0, "tau": 0.5}
    assert np.all([not defaults[name] for name in ("fedavg", "fedentropy")])
    assert {one.name: one.default for one in SELECTORS.settings("fedentopt").values()} == {
        "buffer": "50%",
        "release": "fifo",
    }
    picks = {name: {one.name: one.default for one in SELECTORS.settings(name).values()} for name in SELECTORS.names}
    assert picks["fed-cbs"] == {"lam": 10.0, "beta": 1.0}
    assert picks["pow-d"] == picks["rpow-d"] == {"d": None}
    assert picks["cpow-d"] == {"d": None, "batch": 64}
    assert picks["hics-fl"] == {
        "scale": 0.1, "temperature": None, "lam": 10.0, "groups": None, "gamma": 4.0, "horizon": None
    }  # fmt: skip
    assert picks["oort"] == {
        "explore": 0.9, "decay": 0.95, "explore_least": 0.2, "clip": 0.98, "cut_off": 0.7, "window": 5.0,
        "threshold": 10.0, "penalty": 2.0, "pace": 20, "pace_step": 5.0,
    }  # fmt: skip
    assert picks["divfl"] == {"greedy": "stochastic", "share": 0.1}
    assert picks["flips"] == {"clusters": None}
    assert not any(picks[name] for name in ("cycle", "clustered-size", "clustered-update", "clustered-label"))


def test_a_keyword_that_an_algorithm_does_not_take_is_refused_with_those_it_takes() -> None:
    for cls in ALGORITHMS:
        accepted = ", ".join(ALGORITHMS.settings(cls.name)) or "none"
        with pytest.raises(InputError) as caught:
            cls(colour=1)
        assert str(caught.value) == f"colour: no setting of {cls.__name__}; accepted: {accepted}"
