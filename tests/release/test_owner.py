"""The owner's settings, as a node's configuration holds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedentopt.errors import InputError
from fedentopt.release import Draw, OwnerSettings, example_weight


def test_the_settings_of_a_node_config() -> None:
    config = {
        "label-epsilon": 0.5,
        "label-epsilon-total": 2,
        "label-report-release": "3",
        "label-report-file": "/var/lib/fl/report.json",
        "label-ledger": "/srv/ledger",
        "num-examples": "uniform",
        "partition-id": 4,
    }
    assert OwnerSettings.read(config) == OwnerSettings(
        0.5, Path("/var/lib/fl/report.json"), 3, 2.0, Path("/srv/ledger"), "uniform"
    )
    assert OwnerSettings.read({"label-epsilon": "None"}) == OwnerSettings(None)
    assert OwnerSettings.read({"label-epsilon": "0.25", "label-report-file": ""}) == OwnerSettings(0.25)


@pytest.mark.parametrize("silent", [{}, {"label-epsilon": ""}, {"label-epsilon": "  "}])
def test_without_the_owners_word_nothing_may_leave(silent: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="label-epsilon: not set by the owner"):
        OwnerSettings.read(silent)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        *(
            ({"label-epsilon": bad}, r"label-epsilon \(node config\)")
            for bad in (0, -1, 0.0, float("nan"), float("inf"), 10**400, "much", True, [1])
        ),
        *(
            ({"label-epsilon-total": bad}, "label-epsilon-total")
            for bad in (0, -1.0, "all", True, float("inf"), float("nan"), [1])
        ),
        *(({"label-report-release": bad}, "label-report-release") for bad in (0, -1, 1.0, 1.5, "two", True, "")),
        *(({"num-examples": bad}, "num-examples: .*noisy, uniform, exact") for bad in ("", "all", 7)),
        ({"label-report-file": "report.json"}, "label-report-file: 'report.json' is not an absolute path"),
        ({"label-ledger": "ledger"}, "label-ledger: 'ledger' is not an absolute path"),
        ({"label-epsilon": "none", "num-examples": "noisy"}, "num-examples: .*uniform, exact"),
    ],
)
def test_what_cannot_be_honoured_is_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        OwnerSettings.read({"label-epsilon": 1.0, **config})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"file": "/tmp/report.json"}, "label-report-file: '/tmp/report.json' is str; accepted: a pathlib.Path"),
        ({"ledger": "/tmp/ledger"}, "label-ledger: '/tmp/ledger' is str; accepted: a pathlib.Path"),
        ({"total": "all"}, "label-epsilon-total: 'all' is not accepted; accepted: a number above 0"),
        ({"total": True}, "label-epsilon-total: True is not accepted"),
    ],
)
def test_what_a_script_may_get_wrong_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        OwnerSettings(0.5, **settings)


@pytest.mark.parametrize(
    ("owner", "counts", "weight"),
    [
        (OwnerSettings(0.5), (700, -3, 299), 996),
        (OwnerSettings(0.5), (700.25, -3.5, 299.0), 996),
        (OwnerSettings(0.5), (-7, 2), 1),
        (OwnerSettings(0.5, weight="noisy"), (5, 0), 5),
        (OwnerSettings(0.5, weight="uniform"), (700, 0, 300), 1),
        (OwnerSettings(0.5, weight="exact"), (700, 0, 300), 1000),
        (OwnerSettings(None), None, 1000),
        (OwnerSettings(None, weight="uniform"), None, 1),
    ],
)
def test_what_stands_for_the_number_of_samples(owner: OwnerSettings, counts: Any, weight: int) -> None:
    draw = None if counts is None else Draw(1, counts, 0.5, None, 0.5, "")
    assert example_weight(owner, 1000, draw) == weight


def test_a_noisy_weight_needs_noisy_counts() -> None:
    with pytest.raises(InputError, match="num-examples"):
        example_weight(OwnerSettings(0.5), 1000, None)
