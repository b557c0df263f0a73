"""A run's settings: one spelling per value, a stable id, refusals that name the field."""

from __future__ import annotations

import numpy as np
import pytest

from fedentopt.errors import InputError
from fedentopt.settings import amount
from fedentopt.simulation.config import SMALL_DATASETS, RunConfig, option_of, options, part_of


def test_equal_settings_have_one_id():
    assert RunConfig(lr=1).run_id == RunConfig(lr=1.0).run_id
    assert RunConfig(cohort=10).run_id == RunConfig(cohort="10").run_id
    assert RunConfig.from_dict(RunConfig(seed=3).to_dict()) == RunConfig(seed=3)


@pytest.mark.parametrize(
    ("spelling", "partition"),
    [("mixed:0.10, .5", "mixed:0.1,0.5"), (" natural ", "natural"), ("shards:02", "shards:2"), ("dir:1e-1", "dir:0.1")],
)
def test_a_partition_has_one_spelling(spelling, partition):
    assert RunConfig(partition=spelling).partition == partition
    assert RunConfig(partition=spelling).run_id == RunConfig(partition=partition).run_id


def test_every_setting_changes_the_id():
    other = {
        "dataset": "cifar10", "fine_labels": True, "image_size": 64, "partition": "iid", "min_samples": 3,
        "clients": 50, "model": "vgg11", "weights": "w.safetensors", "algorithm": "fedrs", "selector": "kl",
        "cohort": "20%", "buffer": "10%", "epsilon": 0.5, "averaging": "samples", "dropout": 0.1, "stragglers": 0.1,
        "speed_spread": 0.5, "rounds": 7, "epochs": 1, "batch_size": 8, "lr": 0.5, "lr_decay": 0.5, "weight_decay": 0.1,
        "momentum": 0.5, "mu": 0.1, "scaffold_variant": "gradient", "fedrs_alpha": 0.1, "fedrs_soft": True,
        "fedlc_tau": 2.0, "clusters": 2, "concat_share": 0.5, "concat_max_rounds": 50, "jitter": 0.1, "flip": 0.1,
        "grayscale": 0.2, "evaluate_every": 3, "precision": "bf16", "seed": 1, "validation": 0.1,
        "client_accuracy": True, "audit": "warn", "size_cap": 3.0, "server_images": 20, "liars": "20%",
        "lie": "rare", "initialisation": "layers", "scaffold_start": "random", "scaffold_divisor": "cohort",
        "fednova_normaliser": "steps",
    }  # fmt: skip
    assert other.keys() == options().keys()
    for name, value in other.items():
        found = option_of(name)  # of one method only
        base = RunConfig() if found is None else RunConfig(**{found[0]: found[1]})
        changed = base.replace(**{name: value})
        assert changed.run_id != base.run_id, name
        assert changed.to_dict()[name] == value
    assert all(declared.help for declared in options().values())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lr": "fast"}, "lr: 'fast' has the wrong type"),
        ({"rounds": 2.0}, "rounds: 2.0 has the wrong type"),
        ({"rounds": True}, "rounds: True has the wrong type"),
        ({"cohort": 2.5}, "cohort: 2.5 has the wrong type"),
        ({"cohort": "ten"}, "cohort: 'ten' is neither a number"),
        ({"cohort": "0%"}, "gives 0 of 100 clients; accepted: 1 to 100"),
        ({"cohort": "101"}, "gives 101 of 100 clients"),
        ({"buffer": "95%", "selector": "fedentopt"}, "at most 90 can be kept out"),
        ({"epsilon": float("nan")}, "epsilon: nan is out of range; accepted: above 0"),
        ({"epsilon": 0.0}, "epsilon: 0.0 is out of range"),
        ({"momentum": 1.0}, "momentum: 1.0 is out of range; accepted: at least 0 and below 1"),
        ({"dropout": 1.5}, "at least 0 and at most 1"),
        ({"partition": "dir:0"}, "partition: 'dir:0'"),
        ({"algorithm": "fedsgd"}, "algorithm: 'fedsgd' is unknown; accepted: fedavg"),
        ({"algorithm": "fedentropy", "selector": "kl"}, "cannot go with fedentropy"),
        ({"seed": -1}, "seed: -1 is out of range"),
        ({"batch_size": 0}, "batch_size: 0 is out of range; accepted: at least 1"),
    ],
)
def test_refusals_name_field_value_and_what_would_do(settings, words):
    with pytest.raises(InputError, match=words.replace("(", r"\(")):
        RunConfig.from_dict(settings)


def test_unknown_settings_are_refused():
    with pytest.raises(InputError, match="learning_rate: unknown setting"):
        RunConfig.from_dict({"learning_rate": 0.1})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: RunConfig.from_dict([1]), r"settings: \[1\] cannot be used; accepted: a mapping of names to values"),
        (lambda: RunConfig.from_dict({None: 2}), "settings: None is no name; accepted: algorithm, "),
        (lambda: RunConfig.from_dict({"settings": 3}), "settings: 3 cannot be used; accepted: a mapping"),
        (lambda: RunConfig.from_dict({"settings": [3]}), r"settings: \[3\] cannot be used"),
        (lambda: RunConfig(settings={1: 2}), "1: unknown setting"),
        (lambda: RunConfig().replace(settings="mu"), "settings: 'mu' cannot be used"),
    ],
)
def test_what_is_no_mapping_of_names_is_refused(make, words):
    with pytest.raises(InputError, match=words):
        make()


def test_settings_may_be_given_as_a_config_keeps_them():
    kept = RunConfig(algorithm="fedprox", settings={"mu": 0.3})
    assert RunConfig(algorithm="fedprox", settings=kept.settings) == kept
    assert RunConfig(algorithm="fedprox").replace(settings=kept.settings) == kept


def test_amounts():
    assert amount("29%", 100, "buffer") == 29  # 0.29 * 100 is 28.999... in binary
    assert amount("33%", 40, "buffer") == 13
    assert amount(7, 100, "cohort") == 7
    assert amount("2.5%", 200, "cohort") == 5
    assert amount("100%", 20, "cohort") == 20
    for more in ("101%", "100.5%", " 100.0001%"):  # of 20 clients all three are 20 once floored
        with pytest.raises(InputError, match=rf"cohort: '{more}' is more than all clients; accepted: at most 100%"):
            amount(more, 20, "cohort")
    for endless in ("1" * 5000, "9" * 400 + "%"):  # more than Python reads, and more than a float holds
        with pytest.raises(InputError, match=r"cohort: '\d{20}'\.\.\. \(\d+ characters\) is neither a number"):
            amount(endless, 100, "cohort")


def test_method_names():
    assert RunConfig().method == "fedavg"
    assert RunConfig(selector="fedentopt").method == "fedentopt"
    assert RunConfig(selector="fedentopt", epsilon=0.5).method == "fedentopt-dp"
    assert RunConfig(algorithm="fedprox", selector="fedentopt").method == "fedprox+fedentopt"
    assert RunConfig(algorithm="fedconcat", epsilon=0.5).method == "fedconcat-dp"
    assert RunConfig(selector="kl").method == "kl"
    assert RunConfig(epsilon=0.5).method == "fedavg"  # random selection reads no counts
    assert RunConfig(selector="mine:Own", epsilon=0.5).method == "mine-own-dp"  # own code may read them


def test_settings_behind_own_ones_are_read_too():
    config = RunConfig.from_dict({"settings": {}, "algorithm": "fedprox", "mu": 0.5, "rounds": 7})
    assert (config.of("algorithm"), config.rounds) == ({"mu": 0.5}, 7)


def test_numbers_of_numpy_are_plain_numbers_in_own_settings():
    settings = {"algorithm.rank": np.int64(3), "algorithm.shape": [np.int32(1), 2]}
    own = RunConfig(algorithm="mine:Own", settings=settings).of("algorithm")
    assert own == {"rank": 3, "shape": (1, 2)}
    assert [type(value) for value in (own["rank"], *own["shape"])] == [int, int, int]


def test_an_option_is_the_setting_behind_its_name():
    methods = {"algorithm": "fedconcat", "selector": "random"}
    assert part_of("concat_share", methods) == part_of("share", methods) == ("algorithm", "share")
    assert part_of("concat_max_rounds", methods) == ("algorithm", "max_rounds")


def test_small_data_sets_may_leave_a_client_one_sample():
    assert RunConfig(dataset="cifar10").least_samples == 10
    assert [RunConfig(dataset=name).least_samples for name in SMALL_DATASETS] == [1] * len(SMALL_DATASETS)
    assert RunConfig(dataset="cifar10", min_samples=3).least_samples == 3
