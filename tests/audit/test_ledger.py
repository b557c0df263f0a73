"""The audit's rules, by observations made by hand."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from fedentopt.audit import POLICIES, Audit, Change
from fedentopt.errors import InputError

CLASSES = 5


def shown(shares: Any, samples: float = 100.0, level: float = 0.8) -> Change:
    """What the training of a client with these labels shows, from a model with even outputs."""
    return Change(level * (np.asarray(shares, dtype=float) - 1 / CLASSES), samples)


def one_class(k: int) -> np.ndarray:
    return np.eye(CLASSES)[k % CLASSES]


def watched(policy: str = "warn", liar: Any = None, **settings: Any) -> Audit:
    """Ten clients of one class each; client 3 may claim something else."""
    audit = Audit(CLASSES, policy, **settings)
    for k in range(10):
        audit.report(k, 100 * one_class(k) if k != 3 or liar is None else liar)
    return audit


def observe(audit: Audit, clients: range = range(10)) -> None:
    audit.observe({k: shown(one_class(k)) for k in clients}, untrained=True)


def test_honest_clients_are_not_suspected() -> None:
    audit = watched()
    observe(audit)
    assert audit.suspects() == {}
    assert max(audit.suspicions().values()) < 1


@pytest.mark.parametrize("liar", [np.full(CLASSES, 20), 100 * one_class(4), np.full(CLASSES, 9999.0)])
def test_a_liar_is_found_and_named_with_the_reason(liar: np.ndarray) -> None:
    audit = watched(liar=liar)
    observe(audit)
    assert list(audit.suspects()) == [3]
    why = str(audit.suspects()[3])
    assert "class 3: " in why
    assert "100% seen" in why
    assert "%" in why.partition(",")[0]


def test_an_even_claim_with_a_part_of_the_truth_passes_but_is_not_believed() -> None:
    """As docs/lying-clients.md says of what passes: it points to the classes that the client has."""
    liar = 10 * one_class(3) + np.full(CLASSES, 18.0)
    for policy in ("warn", "quarantine", "replace"):
        audit = watched(policy, liar=liar)
        observe(audit)
        observe(audit)
        assert audit.suspects() == {}
    assert audit.believed(3)[3] > 90


def test_a_liar_is_let_back_when_its_new_report_fits() -> None:
    audit = watched(liar=np.full(CLASSES, 20))
    observe(audit)
    assert list(audit.suspects()) == [3]
    audit.report(3, 100 * one_class(3))
    assert audit.suspects() == {}


def test_who_was_not_seen_is_not_judged() -> None:
    audit = watched(liar=np.full(CLASSES, 20))
    observe(audit, range(4, 10))
    assert audit.suspects() == {}
    assert 3 not in audit.suspicions()
    assert audit.estimate(3) is None
    assert audit.times_seen(3) == 0


def test_too_few_clients_make_no_median() -> None:
    audit = watched(liar=np.full(CLASSES, 20))
    observe(audit, range(2, 6))
    assert audit.suspects() == {}
    observe(audit, range(6, 8))
    assert list(audit.suspects()) == [3]


@pytest.mark.parametrize("policy", POLICIES)
def test_what_each_policy_believes(policy: str) -> None:
    audit = watched(policy, liar=np.full(CLASSES, 200.0))
    np.testing.assert_array_equal(audit.believed(3), np.full(CLASSES, 200.0))
    observe(audit)
    if policy == "replace":  # for everybody that was seen, at the size it trained with
        np.testing.assert_allclose(audit.believed(3), 100 * one_class(3), atol=1e-6)
    else:
        np.testing.assert_array_equal(audit.believed(3), np.full(CLASSES, 200.0))


def test_sizes_are_capped_at_a_multiple_of_the_median() -> None:
    audit = watched(liar=np.full(CLASSES, 2.0**53), size_cap=10)
    np.testing.assert_allclose(audit.believed(3), np.full(CLASSES, 200.0))
    np.testing.assert_array_equal(audit.believed(4), 100 * one_class(4))
    replaced = watched("replace", size_cap=2)
    replaced.observe({k: shown(one_class(k), samples=1e9) for k in range(10)}, untrained=True)
    assert replaced.believed(1).sum() == pytest.approx(200)


@pytest.mark.parametrize("samples", [5, 20, 100, 500])
@pytest.mark.parametrize("epsilon", [0.1, 0.5])
def test_noise_in_reports_is_no_lie(samples: int, epsilon: float) -> None:
    """With 20 samples per client and epsilon 0.5, noise alone moves reports by a fifth and more."""
    rng = np.random.default_rng(0)
    accused = []
    for _ in range(20):
        audit = Audit(CLASSES, epsilon=epsilon)
        for k in range(40):
            audit.report(k, samples * one_class(k) + rng.laplace(0, 1 / epsilon, CLASSES))
        for _ in range(2):
            audit.observe({k: shown(one_class(k), samples) for k in range(40)}, untrained=True)
        accused.append(len(audit.suspects()))
    assert np.mean(accused) <= 0.02 * 40


def test_noise_hides_no_liar_whose_report_is_large_against_it() -> None:
    """By hand: (5 + 2 sqrt 5) / (2 * 0.5) over 100 - sqrt(10) / 0.5 is 0.101."""
    audit = watched(liar=np.full(CLASSES, 20), epsilon=0.5)
    observe(audit)
    assert audit.distance(3) == pytest.approx(0.8 - 0.1011, abs=1e-4)
    assert list(audit.suspects()) == [3]


def test_fresh_models_count_more() -> None:
    """Weights are squared levels: 0.8 against 0.2 is 16 to 1."""
    audit = watched()
    audit.observe({k: shown(one_class(k), level=0.8) for k in range(10)}, untrained=True)
    audit.observe({k: shown(one_class(k + 1), level=0.2) for k in range(10)}, untrained=True)
    found = audit.estimate(0)
    assert found is not None
    np.testing.assert_allclose(found.shares, (16 * one_class(0) + one_class(1)) / 17, atol=1e-6)
    assert audit.times_seen(0) == 2


def test_state_survives_json() -> None:
    first = watched("replace", liar=np.full(CLASSES, 20))
    observe(first)
    second = watched("replace", liar=np.full(CLASSES, 20))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for audit in (first, second):
        audit.observe({k: shown(one_class(k), level=0.37) for k in range(0, 10, 2)})
    for k in range(10):
        np.testing.assert_array_equal(first.believed(k), second.believed(k))
    assert first.suspicions() == second.suspicions()
    first.forget([3])
    assert first.times_seen(3) == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"policy": "harsh"}, "audit: 'harsh' is unknown; accepted: off, warn, replace, quarantine"),
        ({"epsilon": 0}, "epsilon: 0 is out of range"),
        ({"size_cap": 0.5}, "size_cap: 0.5 is out of range; accepted: at least 1, or none"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Audit(CLASSES, **settings)


def test_reports_that_do_not_add_up_are_refused() -> None:
    audit = watched()
    with pytest.raises(InputError, match=r"counts: of client 3: shape \(5,\); accepted: .* at most 2\*\*53"):
        audit.report(3, np.full(CLASSES, 1e308))
    observe(audit)
    assert np.isfinite(list(audit.suspicions().values())).all()


def test_bad_reports_and_states_are_refused() -> None:
    audit = Audit(CLASSES)
    with pytest.raises(InputError, match=r"client 'a': shape \(3,\); accepted: \(5,\)"):
        audit.report("a", [1, 2, 3])
    with pytest.raises(InputError, match="of another audit"):
        audit.load_state_dict({"policy": "replace", "seen": []})
    with pytest.raises(InputError, match="2 classes; accepted: 5"):
        audit.load_state_dict({"policy": "warn", "seen": [["a", 1.0, [0.5, 0.5], 0.1, 0.5, 10, 1]]})
    with pytest.raises(InputError, match="state: 2 entries for a client"):
        audit.load_state_dict({"policy": "warn", "seen": [["a", 1.0]]})
    good = ["a", 1.0, [0.2] * CLASSES, 0.1, 0.5, 10, 1]
    audit.load_state_dict({"policy": "warn", "seen": [good]})
    kept = audit.state_dict()
    odd = (None, True, "x", [], {}, np.nan, np.inf, 10**400, -1)
    bad = [[*good[:place], value, *good[place + 1 :]] for place in (1, 2, 6) for value in (*odd, 0)]
    bad += [[*good[:place], value, *good[place + 1 :]] for place in (3, 4, 5) for value in odd]
    bad += [[*good[:place], 1.1, *good[place + 1 :]] for place in (1, 3, 4)]  # more than the weight, or another one
    bad += [[*good[:2], shares, *good[3:]] for shares in ([0.3, *[0.2] * 4], [-0.1, 0.5, *[0.2] * 3])]
    bad += [[value, *good[1:]] for value in (None, True, 1.5, [])]
    for seen in (None, 3, "abc", [None], [3], [good, good], *([entry] for entry in bad)):
        with pytest.raises(InputError, match=r"state: .*; accepted: "):
            audit.load_state_dict({"policy": "warn", "seen": seen})
    with pytest.raises(InputError, match=r"state: .*; accepted: "):
        audit.load_state_dict({"policy": "warn", "seen": [], "recalls": 3})
    assert audit.state_dict() == kept, "nothing of it was taken"
    for wrong in (0, "3", True):
        with pytest.raises(InputError, match=r"num_classes: .* accepted: whole numbers from 1"):
            Audit(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (Change(np.zeros((1, CLASSES)), 5), r"head: of client 'a': shape \(1, 5\); accepted: \(5,\)"),
        (Change(np.full(CLASSES, np.nan), 5), "head: of client 'a': .* finite"),
        (Change(np.array([1e300, -1e300, 0, 0, 0]), 5), "head: of client 'a': .* at most 1e\\+100 in size"),
        (Change(np.zeros(CLASSES), np.nan), "samples: nan of client 'a'; accepted: finite, from 0 on"),
    ],
)
def test_what_cannot_be_observed_is_refused_by_name_and_changes_nothing(change: Change, words: str) -> None:
    audit = watched()
    with pytest.raises(InputError, match=words):
        audit.observe({0: shown(one_class(0)), "a": change})
    assert audit.times_seen(0) == 0


def test_what_is_as_far_as_accepted_leaves_a_state_that_can_be_loaded() -> None:
    rng = np.random.default_rng(0)
    for untrained in (True, False):
        for _ in range(50):
            audit = watched()
            changes = rng.uniform(-1, 1, (6, CLASSES)) * rng.choice([1e-3, 1.0, 1e100], (6, 1))
            audit.observe({k: Change(row, 10) for k, row in enumerate(changes)}, untrained=untrained)
            watched().load_state_dict(json.loads(json.dumps(audit.state_dict())))
            assert np.isfinite(list(audit.suspicions().values())).all()


def test_who_has_the_classes_it_claims_is_not_suspected_for_amounts() -> None:
    """Estimates exaggerate: a report in the same direction is no lie, whatever the distance."""
    audit = watched(liar=np.array([10, 10, 10, 60, 10]))  # seen: class 3 alone
    observe(audit)
    assert audit.distance(3) == pytest.approx(0.4)
    assert audit.entries()[3].agreement == pytest.approx(1)
    assert audit.entries()[3].score > 10
    assert audit.suspects() == {}


def test_a_report_that_nothing_follows_is_found_at_the_second_look_even_where_distances_are_large() -> None:
    """Of honest clients' two classes the estimates show one: distances from 0.05 to 0.6, so 0.8 is no outlier."""
    audit = Audit(CLASSES)
    for k, other in enumerate(np.linspace(0.05, 0.6, 10)):
        audit.report(k, 100 * ((1 - other) * one_class(k) + other * one_class(k + 1)))
    audit.report(3, np.full(CLASSES, 20))
    seen = {k: shown(one_class(k)) for k in range(10)}
    audit.observe(seen, untrained=True)
    assert audit.suspects() == {}
    audit.observe(seen, untrained=True)
    assert list(audit.suspects()) == [3]
    assert audit.entries()[3].agreement == 0
    assert audit.entries()[3].score < 2.5


def test_balanced_clients_are_never_unrelated() -> None:
    audit = Audit(CLASSES)
    rng = np.random.default_rng(0)
    for k in range(20):
        audit.report(k, np.full(CLASSES, 20))
    for _ in range(5):
        audit.observe({k: shown(np.full(CLASSES, 0.2) + rng.normal(0, 0.01, CLASSES)) for k in range(20)})
    assert audit.suspects() == {}


def test_balanced_clients_whose_estimates_are_all_poor_are_not_unrelated() -> None:
    """An even report agrees with nothing; where everybody's estimate is off alike, nobody stands out."""
    audit = Audit(CLASSES)
    for k in range(12):
        audit.report(k, np.full(CLASSES, 20))
    for _ in range(4):
        audit.observe({k: shown(0.7 * one_class(k) + 0.06 + 0.002 * k) for k in range(12)}, untrained=True)
    assert min(audit.distances().values()) > 0.3
    assert audit.suspects() == {}
