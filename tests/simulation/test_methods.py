"""Methods by name: the grammar, what it refuses, one's own code with settings, and the identity of runs."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import pytest

from fedentopt.algorithms import ALGORITHMS, Algorithm, FedProx, Scaffold, setting
from fedentopt.errors import InputError
from fedentopt.registry import Registry
from fedentopt.selection import SELECTORS, EntropySelector, RandomSelector, Selector
from fedentopt.selection.fedentropy import ValueSelector
from fedentopt.settings import Setting
from fedentopt.simulation.config import FIELDS, RunConfig
from fedentopt.simulation.methods import apply_settings, build_algorithm, build_selector, parse_method, parse_seeds


class Own(Algorithm):
    """An algorithm of one's own."""

    beta: float = setting(0.5, help="a number", low=0, high=1)
    mode: str = setting("a", help="a word", choices=("a", "b"))
    width: int = setting(4, help="both parts have one")


class Aware(Algorithm):
    """One whose server reads label counts."""

    reads_label_counts = True


class Pick(Selector):
    """A selector of one's own."""

    name = "pick"
    width: int = setting(2, help="a whole number", low=1)

    def pick(self, available: np.ndarray, losses: np.ndarray | None) -> list[int]:
        return available[: self.cohort_size].tolist()


class Blind(Pick):
    """One that reads no label counts."""

    name = "blind"
    reads_label_counts = False


class Made(Own):
    """What `factory` makes."""

    def __init__(self, *given: Any) -> None:
        super().__init__()
        self.given = given


def factory(config: RunConfig, beta: float = 0.5, deep: int | None = None, soft=False, word: str = "x") -> Made:
    return Made(config, beta, deep, soft, word)


def anything(config: RunConfig, **settings: Any) -> Made:
    return Made(config, settings)


def selecting(config: RunConfig, width: int = 1) -> Pick:
    return Pick(config.cohort_size, seed=config.seed, width=width)


M = __name__
PLAIN = {"algorithm": "fedavg", "selector": "random", "epsilon": None}
GRAMMAR: list[tuple[str, dict[str, Any]]] = [
    ("fedavg", {}),
    ("  FedAvg ", {}),
    ("random", {}),
    ("fedprox", {"algorithm": "fedprox"}),
    ("balanced-softmax", {"algorithm": "balanced-softmax"}),
    ("fedentopt", {"selector": "fedentopt"}),
    ("kl", {"selector": "kl"}),
    ("fedprox+fedentopt", {"algorithm": "fedprox", "selector": "fedentopt"}),
    ("fedavg+random", {}),
    ("fedentopt-dp", {"selector": "fedentopt", "epsilon": 0.5}),
    ("FedProx+KL-DP", {"algorithm": "fedprox", "selector": "kl", "epsilon": 0.5}),
    ("fedconcat-dp", {"algorithm": "fedconcat", "epsilon": 0.5}),
    ("feddisco-dp", {"algorithm": "feddisco", "epsilon": 0.5}),
    ("fedconcat-dp+random", {"algorithm": "fedconcat", "epsilon": 0.5}),
    ("fedentopt-dp:epsilon=2", {"selector": "fedentopt", "epsilon": 2.0}),
    ("fedprox:mu=0.1", {"algorithm": "fedprox", "algorithm.mu": 0.1}),
    ("fedentopt-dp:buffer=30%", {"selector": "fedentopt", "epsilon": 0.5, "selector.buffer": "30%"}),
    # Behind all: settings of either part, or of the run.
    (
        "fedprox+fedentopt:mu=0.1,buffer=30%,rounds=7",
        {"algorithm": "fedprox", "selector": "fedentopt", "algorithm.mu": 0.1, "selector.buffer": "30%", "rounds": 7},
    ),
    # Behind each.
    (
        "fedprox:mu=0.1,lr=1+fedentopt:buffer=3, rounds=7",
        {
            "algorithm": "fedprox", "selector": "fedentopt", "algorithm.mu": 0.1, "lr": 1.0, "selector.buffer": "3",
            "rounds": 7,
        },
    ),
    ("scaffold:variant=gradient", {"algorithm": "scaffold", "algorithm.variant": "gradient"}),
    ("scaffold:scaffold_variant=gradient", {"algorithm": "scaffold", "algorithm.variant": "gradient"}),
    ("fedrs:soft=yes,fedrs_alpha=0.1", {"algorithm": "fedrs", "algorithm.soft": True, "algorithm.alpha": 0.1}),
    # Values with + : and , in them.
    ("fedavg:lr=1e+3", {"lr": 1000.0}),
    ("fedprox:mu=1e+3+kl:lr=2e+1", {"algorithm": "fedprox", "selector": "kl", "algorithm.mu": 1000.0, "lr": 20.0}),
    ("fedavg:partition=dir:0.5,rounds=7", {"partition": "dir:0.5", "rounds": 7}),
    ("fedavg:dataset=a,b.npz,rounds=7", {"dataset": "a,b.npz", "rounds": 7}),
    ("fedavg:dataset=a=b.npz", {"dataset": "a=b.npz"}),
    ("fedavg:dataset=a+b.npz", {"dataset": "a+b.npz"}),
    ("fedavg:dataset=a+b.npz+kl", {"selector": "kl", "dataset": "a+b.npz"}),
    (f"fedavg:dataset=a+b+{M}:Pick:width=3", {"selector": f"{M}:Pick", "dataset": "a+b", "selector.width": 3}),
    ("fedavg:image_size=none", {"image_size": None}),
    # One's own code, in both places, with and without settings.
    (f"{M}:Own", {"algorithm": f"{M}:Own"}),
    (f"{M}:Own:beta=1", {"algorithm": f"{M}:Own", "algorithm.beta": 1.0}),
    (f"{M}:Pick", {"selector": f"{M}:Pick"}),
    (f"{M}:Pick-dp:width=3", {"selector": f"{M}:Pick", "epsilon": 0.5, "selector.width": 3}),
    (f"{M}:Aware-dp", {"algorithm": f"{M}:Aware", "epsilon": 0.5}),
    (f"{M}:Own+fedentopt:buffer=2", {"algorithm": f"{M}:Own", "selector": "fedentopt", "selector.buffer": "2"}),
    (f"fedprox:mu=0.2+{M}:Pick", {"algorithm": "fedprox", "algorithm.mu": 0.2, "selector": f"{M}:Pick"}),
    (
        f"{M}:Own:beta=0.9,mode=b,width=1+{M}:Pick-dp:width=3,partition=classes:2",
        {
            "algorithm": f"{M}:Own", "selector": f"{M}:Pick", "epsilon": 0.5, "algorithm.beta": 0.9,
            "algorithm.mode": "b", "algorithm.width": 1, "selector.width": 3, "partition": "classes:2",
        },
    ),
    (f"{M}:Own+{M}:Pick:beta=0.9", {"algorithm": f"{M}:Own", "selector": f"{M}:Pick", "algorithm.beta": 0.9}),
    (f"{M}:Own+{M}:Pick:width=9", {"algorithm": f"{M}:Own", "selector": f"{M}:Pick", "selector.width": 9}),
    (
        f"{M}:factory:beta=1,deep=3,soft=true,word=1",
        {
            "algorithm": f"{M}:factory", "algorithm.beta": 1.0, "algorithm.deep": 3, "algorithm.soft": True,
            "algorithm.word": "1",
        },
    ),
    (f"{M}:factory:deep=none", {"algorithm": f"{M}:factory", "algorithm.deep": None}),
    (f"{M}:anything:what=ever", {"algorithm": f"{M}:anything", "algorithm.what": "ever"}),
    (f"fedavg+{M}:selecting:width=3", {"selector": f"{M}:selecting", "selector.width": 3}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "expected"), GRAMMAR, ids=[name.replace(M, "M") for name, _ in GRAMMAR])
def test_the_grammar(name: str, expected: dict[str, Any]) -> None:
    found = parse_method(name)
    assert found == PLAIN | expected
    assert {key: type(value) for key, value in found.items()} == {
        key: type(value) for key, value in (PLAIN | expected).items()
    }
    RunConfig.from_dict(found)  # every one of them is a run


def test_own_code_whose_settings_cannot_be_told_is_refused() -> None:
    with pytest.raises(
        InputError, match="the settings of builtins:min cannot be told; accepted: a class or a function"
    ):
        parse_method("builtins:min:beta=1")


REFUSED = [
    ("fedsgd", "method: 'fedsgd' is unknown; accepted: an algorithm (fedavg, fedprox,"),
    ("", "method: '' is unknown"),
    ("fedentopt+fedprox", "method: 'fedentopt+fedprox' is unknown"),
    ("fedavg+kl+random", "method: 'fedavg+kl+random' is unknown"),
    ("fedavg+fedprox", "method: 'fedavg+fedprox' is unknown"),
    ("fedavg+fedentop:dataset=b", "method: 'fedavg+fedentop:dataset=b' is unknown"),
    ("fedprox:mu=1+fedentop", "mu: '1+fedentop' cannot be used; accepted: a number"),
    ("fedavg-dp", "method: 'fedavg-dp' adds noise to label counts that it does not use; accepted: -dp with "),
    ("fedprox+random-dp", "method: 'fedprox+random-dp' adds noise to label counts that it does not use"),
    ("balanced-softmax-dp", "adds noise to label counts that it does not use"),
    (f"{M}:Own-dp", "adds noise to label counts that it does not use"),
    (f"{M}:Blind-dp", "adds noise to label counts that it does not use"),
    (
        "fedprox:nu=1",
        "method: 'fedprox:nu=1': nu is no setting of fedprox; accepted: mu, or a setting of the run, such as lr",
    ),
    ("fedavg:nu=1", "method: 'fedavg:nu=1': nu is no setting of it; accepted: a setting of the run, such as lr"),
    ("fedprox:buffer=3+fedentopt", "buffer is no setting of fedprox; accepted: mu, or"),
    ("kl:buffer=3", "buffer is no setting of kl"),
    ("fedprox:seed=3", "seed is no setting of fedprox"),
    ("fedprox:algorithm=fedavg", "algorithm is no setting of fedprox"),
    ("fedprox:mu=1,mu=2", "method: 'fedprox:mu=1,mu=2' gives mu more than once; accepted: each setting once"),
    ("fedprox:mu=1+fedentopt:mu=2", "gives mu more than once"),
    ("scaffold:variant=niid,scaffold_variant=gradient", "gives scaffold_variant more than once"),
    ("fedprox:mu=much", "mu: 'much' cannot be used; accepted: a number"),
    ("fedprox:mu=-1", "mu: -1.0 is out of range; accepted: at least 0"),
    ("fedavg:rounds=2.5", "rounds: '2.5' cannot be used; accepted: a whole number"),
    ("fedavg:rounds=0", "rounds: 0 is out of range; accepted: at least 1"),
    ("scaffold:variant=other", "variant: 'other' is unknown; accepted: niid, gradient"),
    (f"{M}:Own:beta=2", "beta: 2.0 is out of range; accepted: at least 0 and at most 1"),
    (f"{M}:Own:gamma=2", "gamma is no setting of"),
    (f"{M}:Pick:width=0", "width: 0 is out of range; accepted: at least 1"),
    (f"{M}:factory:beta=x", "beta: 'x' cannot be used; accepted: a number"),
    (f"{M}:factory:gamma=x", "gamma is no setting of"),
    ("nowhere:f:beta=1", "algorithm: no module 'nowhere' for 'nowhere:f', nor in the current directory"),
    (f"{M}:nothing:beta=1", "has no attribute 'nothing'"),
]


@pytest.mark.parametrize(("name", "words"), REFUSED, ids=[name.replace(M, "M") for name, _ in REFUSED])
def test_what_the_grammar_refuses(name: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_method(name)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_noise_is_offered_to_those_that_read_counts() -> None:
    with pytest.raises(InputError) as caught:
        parse_method("fedavg-dp")
    offered = str(caught.value).rpartition("-dp with ")[2].split(", ")
    assert {"fedconcat", "feddisco", "fedentopt", "kl"} <= set(offered)
    assert not {"fedavg", "random", "fedprox"} & set(offered)
    for name in offered:
        assert parse_method(f"{name}-dp")["epsilon"] == 0.5


# --- settings beside the name
def test_settings_that_are_given_beside_are_applied_where_a_method_has_them() -> None:
    given = {"mu": "0.3", "buffer": 7, "scaffold_variant": "gradient", "lr": 1, "nu": 3}
    settings, used = apply_settings(parse_method("fedprox+fedentopt"), given)
    assert settings == PLAIN | {
        "algorithm": "fedprox", "selector": "fedentopt", "algorithm.mu": 0.3, "selector.buffer": "7", "lr": 1.0
    }  # fmt: skip
    assert used == {"mu", "buffer", "lr"}
    settings, used = apply_settings(parse_method("scaffold"), given)
    assert settings == PLAIN | {"algorithm": "scaffold", "algorithm.variant": "gradient", "lr": 1.0}
    assert used == {"scaffold_variant", "lr"}
    assert parse_method("scaffold") == PLAIN | {"algorithm": "scaffold"}, "what was given is left as it was"


def test_own_settings_come_out_in_their_type_whichever_way_they_came() -> None:
    method = f"{M}:Own"
    words, numbers = (apply_settings(parse_method(method), {"beta": beta})[0] for beta in ("1", 1))
    behind = parse_method(f"{method}:beta=1")
    ids = {RunConfig.from_dict(settings).run_id for settings in (words, numbers, behind)}
    assert len(ids) == 1
    free, used = apply_settings(parse_method(f"{M}:anything"), {"what": 3, "more": "4"})
    assert (free["algorithm.what"], free["algorithm.more"], used) == (3, "4", {"what", "more"})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"width": 3}, "set: width is a setting of {M}:Own and {M}:Pick; accepted: it behind one of them, as in NAME:"),
        ({"beta": 3}, "beta: 3.0 is out of range; accepted: at least 0 and at most 1"),
        ({"beta": [1]}, "beta: [1] has the wrong type; accepted: float"),
        ({"seed": 3}, "set: seed is no setting of "),
        ({"rounds": 2.5}, "rounds: 2.5 has the wrong type; accepted: int"),
    ],
)
def test_what_is_refused_beside_the_name(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as caught:
        apply_settings(parse_method(f"{M}:Own+{M}:Pick"), given)
    assert words.replace("{M}", M) in str(caught.value)


# --- from a config to the objects
def config(**settings: Any) -> RunConfig:
    return RunConfig.from_dict({"clients": 20, "cohort": "4", "seed": 3} | settings)


def test_built_in_methods_get_their_settings() -> None:
    prox = build_algorithm(config(algorithm="fedprox", mu=0.3))
    assert isinstance(prox, FedProx)
    assert prox.mu == 0.3
    scaffold = build_algorithm(config(algorithm="scaffold", scaffold_variant="gradient"))
    assert isinstance(scaffold, Scaffold)
    assert scaffold.variant == "gradient"
    entropy = build_selector(config(selector="fedentopt", buffer="25%"), prox)
    assert isinstance(entropy, EntropySelector)
    assert (entropy.cohort_size, entropy.buffer_size, entropy.seed) == (4, 5, 3)
    draw = build_selector(config(algorithm="fedentropy"), build_algorithm(config(algorithm="fedentropy")))
    assert isinstance(draw, ValueSelector)
    assert (draw.cohort_size, draw.seed) == (4, 3)
    assert isinstance(build_selector(config(), prox), RandomSelector)


def test_own_classes_and_factories_get_theirs() -> None:
    own = build_algorithm(config(algorithm=f"{M}:Own", settings={"beta": 1, "mode": "b"}))
    assert isinstance(own, Own)
    assert own.settings() == {"beta": 1.0, "mode": "b", "width": 4}
    given = config(algorithm=f"{M}:factory", settings={"beta": 0.25, "soft": True})
    made = build_algorithm(given)
    assert isinstance(made, Made)
    assert made.given == (given, 0.25, None, True, "x")
    given = config(algorithm=f"{M}:anything", settings={"what": 3})
    assert build_algorithm(given).given == (given, {"what": 3})
    for name in ("Pick", "selecting"):
        picks = build_selector(config(selector=f"{M}:{name}", settings={"width": 3}), own)
        assert isinstance(picks, Pick)
        assert (picks.cohort_size, picks.seed, picks.width) == (4, 3, 3)


def made_a_class(given: RunConfig) -> type:
    return Own


def made_a_selector_class(given: RunConfig) -> type:
    return Pick


def made_a_number(given: RunConfig) -> int:
    return 3


class NeedsText(Pick):
    needs = "loss"  # type: ignore[assignment]


class NeedsMore(Pick):
    needs = frozenset({"loss", "weather"})


@pytest.mark.parametrize(
    ("part", "name", "settings", "words"),
    [
        ("algorithm", "made_a_class", {}, "algorithm: '{M}:made_a_class' made a Own; accepted: an Algorithm"),
        ("algorithm", "made_a_number", {}, "algorithm: '{M}:made_a_number' made a int; accepted: an Algorithm"),
        ("algorithm", "Pick", {}, "algorithm: '{M}:Pick' is of the kind Selector; accepted: Algorithm"),
        ("algorithm", "Own", {"gamma": 1}, "gamma: no setting of {M}:Own; accepted: beta, mode, width"),
        ("algorithm", "Own", {"beta": "x"}, "beta: 'x' has the wrong type; accepted: float"),
        (
            "algorithm",
            "factory",
            {"gamma": 1},
            "algorithm: calling {M}:factory raised TypeError: factory() got an unex",
        ),
        ("selector", "Own", {}, "selector: '{M}:Own' is of the kind Algorithm; accepted: Selector"),
        ("selector", "made_a_number", {}, "selector: '{M}:made_a_number' made a int without register, select,"),
        ("selector", "made_a_selector_class", {}, "made the class Pick; accepted: a Selector object"),
        ("selector", "Pick", {"gamma": 1}, "gamma: no setting of {M}:Pick; accepted: width"),
        ("selector", "Pick", {"width": 0}, "width: 0 is out of range; accepted: at least 1"),
        ("selector", "NeedsText", {}, "needs 'loss'; accepted: a set of candidate_loss, head, kept, loss, seconds, u"),
        ("selector", "NeedsMore", {}, "accepted: a set of candidate_loss, head, kept, loss, seconds, update"),
    ],
)
def test_own_code_that_cannot_be_honoured_is_refused(part: str, name: str, settings: Any, words: str) -> None:
    given = config(**{part: f"{M}:{name}"}, settings={f"{part}.{key}": value for key, value in settings.items()})
    with pytest.raises(InputError) as caught:
        build_selector(given, Own()) if part == "selector" else build_algorithm(given)
    assert words.replace("{M}", M) in str(caught.value)
    assert "\n" not in str(caught.value)


class Brings(Own):
    own_selector = ValueSelector


def test_an_own_algorithm_that_draws_its_own_clients_goes_with_no_selector() -> None:
    given = config(algorithm=f"{M}:Brings", selector="kl")
    with pytest.raises(InputError, match=f"selector: 'kl' cannot go with {M}:Brings, which draws its own clients"):
        build_selector(given, build_algorithm(given))


# --- identity
def other_value(declared: Setting) -> Any:
    """A value that is not the default."""
    if declared.choices:
        return next(word for word in declared.choices if word != declared.default)
    if declared.amount:
        return "3"
    if declared.kind == "bool":
        return not declared.default
    if declared.default is None:
        return declared.check(20)
    for value in (declared.default / 2, declared.default * 2) if declared.kind == "float" else (declared.default + 1,):
        try:
            return declared.check(value)
        except InputError:
            continue
    raise AssertionError(f"no other value for {declared.name}")


@pytest.mark.parametrize(
    ("registry", "name"), [(registry, name) for registry in (ALGORITHMS, SELECTORS) for name in registry.names]
)
def test_configs_of_every_method_survive_a_round_trip(registry: Registry[Any], name: str) -> None:
    part = registry.kind
    plain = RunConfig(**{part: name}, seed=4, averaging="samples", speed_spread=0.25)
    assert RunConfig.from_dict(plain.to_dict()) == plain
    changed = {f"{part}.{key}": other_value(declared) for key, declared in registry.settings(name).items()}
    full = RunConfig(**{part: name}, settings=changed)
    assert full.of(part) == {key.partition(".")[2]: value for key, value in changed.items()}
    again = RunConfig.from_dict(json.loads(json.dumps(full.to_dict())))
    assert again == full
    assert (again.run_id, again.method) == (full.run_id, full.method)
    for key, value in changed.items():
        alone = RunConfig(**{part: name}, settings={key: value})
        assert alone.run_id != RunConfig(**{part: name}).run_id, key


def test_configs_of_own_methods_survive_a_round_trip() -> None:
    own = config(algorithm=f"{M}:Own", selector=f"{M}:Pick", settings={"algorithm.width": 3, "selector.width": 4})
    assert own.of("algorithm") == {"width": 3}
    assert own.of("selector") == {"width": 4}
    assert (own.to_dict()["algorithm.width"], own.to_dict()["selector.width"]) == (3, 4)
    assert RunConfig.from_dict(json.loads(json.dumps(own.to_dict()))) == own
    assert own.own_code == (f"{M}:Own", f"{M}:Pick")
    assert own.replace(seed=9).of("algorithm") == {"width": 3}
    assert own.replace(algorithm="fedavg").settings == (("selector", "width", 4),)
    assert own.replace(settings={"algorithm.width": 5}).of("algorithm") == {"width": 5}


def test_an_own_setting_may_have_the_name_of_an_option() -> None:
    own = RunConfig(algorithm=f"{M}:Own", settings={"mu": 0.3})
    assert own.of("algorithm") == {"mu": 0.3}
    assert (own.to_dict()["mu"], own.to_dict()["algorithm.mu"]) == (1e-4, 0.3)
    assert RunConfig.from_dict(own.to_dict()) == own


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"algorithm": "fedavg", "mu": 0.1}, "mu: is a setting of fedprox, which 'fedavg' does not use"),
        ({"algorithm": "fedprox", "algorithm.muu": 1.0}, "muu: unknown setting of fedprox+random; did you mean mu?"),
        ({"selector": "kl", "selector.buffer": "3"}, "buffer: unknown setting of fedavg+kl"),
        ({"algorithm": "fedprox", "settings": {"mu": -1}}, "mu: -1.0 is out of range"),
        (
            {"algorithm": "{M}:Own", "selector": "{M}:Pick", "width": 3},
            "width: may be a setting of {M}:Own and {M}:Pick; accepted: algorithm.width or selector.width",
        ),
    ],
)
def test_settings_of_no_method_are_refused(settings: dict[str, Any], words: str) -> None:
    given = {key: value.replace("{M}", M) if isinstance(value, str) else value for key, value in settings.items()}
    with pytest.raises(InputError) as caught:
        RunConfig.from_dict(given)
    assert words.replace("{M}", M) in str(caught.value)


OLD_KEYS = (
    "dataset", "fine_labels", "image_size", "partition", "min_samples", "clients", "model", "weights", "algorithm",
    "selector", "cohort", "buffer", "epsilon", "dropout", "stragglers", "rounds", "epochs", "batch_size", "lr",
    "lr_decay", "weight_decay", "momentum", "mu", "scaffold_variant", "fedrs_alpha", "fedrs_soft", "fedlc_tau",
    "clusters", "concat_share", "concat_max_rounds", "jitter", "flip", "grayscale", "evaluate_every", "precision",
    "seed",
)  # fmt: skip
"""The settings of a run when the first results were published, all of them in one flat list."""
OLD_DEFAULTS = {
    "buffer": "50%", "mu": 1e-4, "scaffold_variant": "niid", "fedrs_alpha": 0.5, "fedrs_soft": False, "fedlc_tau": 1.0,
    "clusters": 5, "concat_share": 0.9, "concat_max_rounds": 500,
}  # fmt: skip
PUBLISHED: list[tuple[dict[str, Any], str]] = [
    ({}, "fedavg_digits_dir0.1_lenet5_s0_f6128c67"),
    ({"selector": "fedentopt"}, "fedentopt_digits_dir0.1_lenet5_s0_9b4cab2f"),
    (
        {"selector": "fedentopt", "buffer": "70%", "epsilon": 0.5, "seed": 3},
        "fedentopt-dp_digits_dir0.1_lenet5_s3_33ace4b2",
    ),
    (
        {"algorithm": "fedprox", "mu": 0.01, "selector": "fedentopt"},
        "fedprox+fedentopt_digits_dir0.1_lenet5_s0_68fb58e9",
    ),
    (
        {"algorithm": "scaffold", "scaffold_variant": "gradient", "partition": "classes:2"},
        "scaffold_digits_classes2_lenet5_s0_c0eed2eb",
    ),
    ({"algorithm": "fedrs", "fedrs_alpha": 0.25, "fedrs_soft": True}, "fedrs_digits_dir0.1_lenet5_s0_9ec1269c"),
    (
        {
            "algorithm": "fedlc", "fedlc_tau": 2.0, "dataset": "cifar10", "rounds": 500, "clients": 100, "cohort": "10",
        },
        "fedlc_cifar10_dir0.1_lenet5_s0_9d23f1f0",
    ),
    (
        {"algorithm": "fedconcat", "clusters": 3, "concat_share": 0.8, "concat_max_rounds": 200, "epsilon": 1.0},
        "fedconcat-dp_digits_dir0.1_lenet5_s0_85f942ea",
    ),
    ({"algorithm": "fedentropy", "clients": 20, "cohort": "25%"}, "fedentropy_digits_dir0.1_lenet5_s0_2367d8f7"),
    (
        {"selector": "kl", "dataset": "cifar100", "fine_labels": True, "model": "vgg11", "seed": 9},
        "kl_cifar100_dir0.1_vgg11_s9_5aa34ab4",
    ),
    (
        {
            "algorithm": "fednova", "dropout": 0.1, "stragglers": 0.3, "epochs": 2, "batch_size": 32, "lr": 0.1,
            "lr_decay": 1.0, "momentum": 0.0, "weight_decay": 0.0,
        },
        "fednova_digits_dir0.1_lenet5_s0_9d5d4316",
    ),
    (
        {
            "algorithm": "my.module:own", "selector": "my.module:pick", "precision": "bf16", "jitter": 0.0, "flip": 0.0,
            "grayscale": 0.0, "image_size": 64, "min_samples": 5, "weights": "w.safetensors", "evaluate_every": 4,
        },
        "my-module-own+my-module-pick_digits_dir0.1_lenet5_s0_01b66a40",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "run_id"), PUBLISHED, ids=[run_id for _, run_id in PUBLISHED])
def test_published_runs_keep_their_ids(settings: dict[str, Any], run_id: str) -> None:
    found = RunConfig.from_dict(settings)
    assert found.run_id == run_id
    fields = {name: declared.default for name, declared in FIELDS.items() if name in OLD_KEYS}
    flat = fields | OLD_DEFAULTS | settings
    assert set(flat) == set(OLD_KEYS)
    assert found.to_dict() == flat
    assert run_id[-8:] == hashlib.sha256(json.dumps(flat, sort_keys=True).encode()).hexdigest()[:8]
    # A config as it was written then, with settings of all methods in it, reads back as the same run.
    assert RunConfig.from_dict(flat) == found


# --- seeds
def test_seeds() -> None:
    assert parse_seeds("3") == (3,)
    assert parse_seeds("0, 2-4,7") == (0, 2, 3, 4, 7)
    for text, words in (
        ("a", "seeds: 'a' cannot be read; accepted: whole numbers such as 0,1,2 or 0-4"),
        ("-1", "cannot be read"),
        ("4-2", "seeds: '4-2' runs backwards"),
        ("0-1000", "seeds: '0-1000' are too many; accepted: at most 1000"),
        ("1,0-2", "gives 1 more than once; accepted: each seed once"),
    ):
        with pytest.raises(InputError) as caught:
            parse_seeds(text)
        assert words in str(caught.value)
