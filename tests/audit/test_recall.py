"""What the server's images say about reports, by recalls made by hand."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from fedentopt.audit import Audit, Change, Recall
from fedentopt.errors import InputError

CLASSES = 5
START = np.full(CLASSES, 0.7)
EVEN = np.full(CLASSES, 20.0)


def one_class(k: int) -> np.ndarray:
    return np.eye(CLASSES)[k % CLASSES]


def trained(k: int, known: float = 0.95, other: float = 0.5, start: np.ndarray = START) -> Recall:
    """Who has one class learns it and forgets the others."""
    return Recall(start, np.where(one_class(k) > 0, known, other))


def watched(policy: str = "warn", liars: tuple[int, ...] = (3,), clients: int = 10, **settings: Any) -> Audit:
    """Clients of one class each; liars claim to have all."""
    audit = Audit(CLASSES, policy, **settings)
    for k in range(clients):
        audit.report(k, EVEN if k in liars else 100 * one_class(k))
    return audit


def observe(audit: Audit, clients: range = range(10), times: int = 3, **about: Any) -> None:
    for _ in range(times):
        audit.observe_recalls({k: trained(k, **about) for k in clients})


def test_who_claims_what_its_model_does_not_know_is_named() -> None:
    """A liar of one class in five: F = 0.8 (0.95 - 0.5) = 0.36, G = (0.25 - 4 * 0.2) / 5 = -0.11."""
    audit = watched()
    observe(audit)
    assert list(audit.suspects()) == [3]
    why = audit.suspects()[3]
    assert str(why) == (
        "on the server's images its model falls 0.36 short in the recall of classes it reports, others 0.00, "
        "and its training changed that by -0.11; worst in class 0: 20% reported"
    )
    assert audit.suspicions()[3] > 5 > max(score for k, score in audit.suspicions().items() if k != 3)


def test_the_best_of_a_round_are_two() -> None:
    """q is a mean of two, so that nobody alone says what can be made of a class."""
    audit = watched(liars=(3,), clients=10)
    for _ in range(3):
        audit.observe_recalls({k: trained(k, known=1.0 if k < 5 else 0.9) for k in range(10)})
    why = audit.suspects()[3]
    assert why.shortfall == pytest.approx((0.95 - 1.0 + 4 * (0.95 - 0.5)) / 5)


def test_balanced_clients_are_not_suspected_alone_or_among_others() -> None:
    rng = np.random.default_rng(0)
    iid = watched(liars=tuple(range(10)))
    for _ in range(5):  # all fall short of the best by chance, and gain nothing any more
        iid.observe_recalls({k: Recall(START, START + rng.uniform(-0.05, 0.05, CLASSES)) for k in range(10)})
    assert iid.suspects() == {}
    among = watched(liars=(3,))
    after = {k: trained(k) for k in range(10)} | {3: Recall(START, np.full(CLASSES, 0.82))}
    for _ in range(3):  # 0.13 short of those that know one class only, but 0.12 better than before
        among.observe_recalls(after)
    assert among.suspects() == {}


def test_a_start_without_skill_tells_nothing() -> None:
    audit = watched()
    observe(audit, start=np.array([1.0, 0.75, 0.5, 0.25, 0.0]))  # one answer for everything
    assert audit.suspects() == {}
    assert audit.suspicions() == {}


def test_training_that_failed_once_is_no_lie() -> None:
    """On average the balanced client 3 falls short and gains nothing; in its best round it does not."""
    failed = watched()
    good = {k: trained(k) for k in range(10)} | {3: Recall(START, np.full(CLASSES, 0.86))}
    for _ in range(3):
        failed.observe_recalls({k: trained(k) for k in range(10)})
    assert list(failed.suspects()) == [3]
    failed.observe_recalls(good)
    assert failed.suspects() == {}


def test_nobody_is_suspected_before_the_third_time() -> None:
    audit = watched()
    observe(audit, times=2)
    assert audit.suspects() == {}
    observe(audit, times=1)
    assert list(audit.suspects()) == [3]


@pytest.mark.parametrize(("other", "suspected"), [(0.69, False), (0.66, True)])
def test_little_is_not_enough(other: float, suspected: bool) -> None:
    """F - G is 0.168 - 0.032, or 0.192 - 0.008: below and above 0.15."""
    audit = watched()
    observe(audit, known=0.9, other=other)
    assert (3 in audit.suspects()) == suspected


def test_too_few_clients_make_no_median() -> None:
    audit = watched(clients=4)
    observe(audit, range(4))
    assert audit.suspects() == {}


def test_a_liar_is_let_back_when_its_new_report_fits() -> None:
    audit = watched()
    observe(audit)
    audit.report(3, 100 * one_class(3))
    assert audit.suspects() == {}


def test_noise_in_reports_is_no_lie() -> None:
    """Epsilon 0.5 and 20 samples: noise alone may have moved a quarter of a report."""
    rng = np.random.default_rng(1)
    audit = Audit(CLASSES, epsilon=0.5)
    for k in range(40):
        audit.report(k, 20 * one_class(k) + rng.laplace(0, 2, CLASSES))
    observe(audit, range(40))
    assert audit.suspects() == {}


@pytest.mark.parametrize("policy", ["warn", "replace"])
def test_what_is_believed_of_a_forger(policy: str) -> None:
    """Its last layer has not moved: no class looks absent. Under replace its recalls take the estimate's place."""
    audit = watched(policy)
    audit.observe({k: Change(0.8 * (one_class(k) - 0.2) if k != 3 else np.zeros(CLASSES), 100.0) for k in range(10)})
    assert audit.believed(3).min() > 10
    observe(audit)
    np.testing.assert_allclose(audit.believed(3), 100 * one_class(3) if policy == "replace" else EVEN, atol=1e-9)
    assert audit.believed(4).argmax() == 4
    assert list(audit.suspects()) == [3]


def test_state_survives_json_and_old_states_load() -> None:
    first = watched("quarantine")
    old = first.state_dict()
    assert set(old) == {"policy", "seen"}
    observe(first)
    second = watched("quarantine")
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for audit in (first, second):
        audit.observe_recalls({k: trained(k, other=0.61) for k in range(0, 10, 3)})
    assert first.suspicions() == second.suspicions()
    assert {k: str(why) for k, why in first.suspects().items()} == {k: str(why) for k, why in second.suspects().items()}
    second.load_state_dict(old)
    assert second.suspects() == {}
    first.forget([3])
    assert 3 not in first.suspicions()


def test_sums_may_be_kept_apart_as_arrays() -> None:
    first = watched("quarantine")
    assert first.arrays() == {}
    observe(first)
    first.observe({k: Change(0.8 * (one_class(k) - 0.2), 100.0) for k in range(10)})
    state, arrays = json.loads(json.dumps(first.state_dict(shares=False))), first.arrays()
    assert {name: sums.shape for name, sums in arrays.items()} == {"shares": (10, CLASSES), "recalls": (10, 3, CLASSES)}
    second = watched("quarantine")
    second.load_state_dict(state, arrays)
    assert second.state_dict() == first.state_dict()
    for wrong in (
        {},
        {"shares": arrays["shares"]},
        {**arrays, "recalls": arrays["recalls"][:, :2]},
        {**arrays, "recalls": arrays["recalls"][:9]},
        {**arrays, "shares": arrays["recalls"]},
        {**arrays, "recalls": np.full_like(arrays["recalls"], np.nan)},
    ):
        with pytest.raises(InputError, match=r"^state: "):
            second.load_state_dict(state, wrong)
        assert second.state_dict() == first.state_dict()
    with pytest.raises(InputError, match=r"^state: sums of shape"):
        second.load_state_dict(first.state_dict(), arrays)


def test_clients_may_be_numbered_by_numpy() -> None:
    first, second = watched(), watched()
    for k in np.arange(10):
        first.observe({k: Change(np.zeros(CLASSES), 5)})
        first.observe_recalls({k: trained(int(k))})
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert first.suspicions() == second.suspicions()


def test_models_that_are_not_finite_are_left_out_and_other_sizes_refused() -> None:
    audit = watched()
    broken = {5: Recall(START, np.full(CLASSES, np.nan))}
    audit.observe_recalls({k: trained(k) for k in range(5)} | broken)
    assert set(audit.suspicions()) == set(range(5))
    with pytest.raises(InputError, match=r"recall: after of client 'a' has shape \(3,\); accepted: \(5,\)"):
        audit.observe_recalls({"a": Recall(START, np.ones(3))})
    for wrong in (np.full(CLASSES, 1e308), np.full(CLASSES, 80.0), -np.ones(CLASSES)):
        with pytest.raises(InputError, match="recall: after of client 'a' is no share; accepted: numbers from 0 to 1"):
            audit.observe_recalls({"a": Recall(START, wrong)})
    with pytest.raises(InputError, match="recalls of 2 classes; accepted: 5"):
        audit.load_state_dict({"policy": "warn", "seen": [], "recalls": [["a", 1.0, [0, 0], [0, 0], [0, 0], 1]]})
