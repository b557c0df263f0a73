"""Plans from label counts: what is tried, what is recommended and why, and that it can be carried out."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from command_line import Said, commander
from fedentopt.errors import InputError
from fedentopt.plan import Plan, make_plan, write_page
from fedentopt.plan.carrying_out import command, python
from fedentopt.plan.costs import privacy_words
from fedentopt.plan.outcome import Choice, Federation, try_choice
from fedentopt.plan.recommendation import describe
from fedentopt.plan.sizes import amount_of_work, away_share, buffer_sizes, cohort_sizes, epsilons, that_differ
from fedentopt.plan.trying import own_settings
from fedentopt.plan.work import seconds
from fedentopt.selection import SELECTORS, EntropySelector, KLSelector, RandomSelector, Selector
from fedentopt.selection.noise import keyed_laplace
from fedentopt.selection.table import CountTable
from fedentopt.selection.trial import counts_only, has_buffer
from fedentopt.tables import counts_lines, read_counts

EXAMPLE = Path(__file__).parents[2] / "examples" / "label_counts.csv"
Command = Callable[..., Said]


@pytest.fixture
def fedentopt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return commander(monkeypatch, capsys)


def two_classes_each(clients: int = 40, classes: int = 6, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    counts = np.zeros((clients, classes))
    for row in counts:
        row[rng.choice(classes, 2, replace=False)] = rng.integers(20, 40, 2)
    return counts


def names(count: int) -> tuple[str, ...]:
    return tuple(f"site {k}" for k in range(count))


def write(path: Path, counts: np.ndarray) -> Path:
    lines = counts_lines(names(len(counts)), [f"c{c}" for c in range(counts.shape[1])], counts)
    path.write_text("".join(",".join(map(str, line)) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def skewed() -> Plan:
    counts = two_classes_each()
    return make_plan(counts, clients=names(40), cohorts=["3", "5", "8"], rounds=20, repetitions=2)


def test_skewed_clients_get_a_selector_that_reads_labels(skewed: Plan) -> None:
    best = skewed.recommendation
    assert not best.is_random
    assert best.chosen.entropy > best.random.entropy + 0.1
    assert best.chosen.choice.cohort == best.random.choice.cohort  # equal sizes are compared
    assert best.reason.count(". ") == 1
    assert best.reason.endswith(".")
    assert f"{best.random.entropy:.2f}" in best.reason
    assert f"{best.chosen.entropy:.2f} of {np.log2(6):.2f} bits" in best.reason
    assert "cost" in best.trade


def test_other_sizes_name_the_choice_they_speak_of() -> None:
    table = read_counts(EXAMPLE)
    plan = make_plan(table.counts, clients=table.clients, classes=table.classes, rounds=5, repetitions=1)
    said = re.findall(r"ohorts of (\d+) .*? reach ([\d.]+) bits \((?:(.+?); )?random", plan.recommendation.trade)
    assert [size for size, _, _ in said] == ["2", "4"]
    for size, bits, named in said:
        found = [describe(o) for o in plan.by_size if o.choice.cohort == int(size) and f"{o.entropy:.2f}" == bits]
        assert (named or describe(plan.recommendation.chosen)) in found


def test_rows_are_what_the_selectors_do(skewed: Plan) -> None:
    document = json.loads(json.dumps(skewed.to_json(), allow_nan=False))
    assert document.keys() == {"settings", "rows", "skipped", "recommendation"}
    (row,) = [
        row
        for row in document["rows"]
        if (row["selector"], row["cohort"], row["buffer"], row["epsilon"], row["away"]) == ("fedentopt", 5, 20, None, 0)
    ]
    counts = two_classes_each()
    means, worst, gaps, asked = [], [], [], np.zeros(40)
    for seed in (0, 1):
        selector = EntropySelector(5, buffer_size=20, seed=seed)
        selector.register(counts)
        cohorts = [selector.select() for _ in range(20)]
        means.append(np.mean([cohort.entropy for cohort in cohorts]))
        worst.append(min(cohort.entropy for cohort in cohorts))
        gaps.append(np.mean([cohort.classes_covered < 6 for cohort in cohorts]))
        for cohort in cohorts:
            asked[list(cohort.clients)] += 0.5
    assert row["mean_entropy"]["mean"] == pytest.approx(np.mean(means))
    assert row["mean_entropy"]["std"] == pytest.approx(np.std(means, ddof=1))
    assert row["worst_entropy"]["least"] == pytest.approx(min(worst))
    assert row["rounds_missing_a_class"]["mean"] == pytest.approx(np.mean(gaps))
    assert row["asked"] == {"least": asked.min(), "median": np.median(asked), "most": asked.max()}
    tried = {row["selector"] for row in document["rows"]} | {one["selector"] for one in document["skipped"]}
    assert tried == {cls.name for cls in counts_only()}
    assert set(document["recommendation"]["asked"]) == set(names(40))


def test_which_classes_are_missed() -> None:
    counts = np.zeros((10, 3))
    counts[:, 0] = 5
    counts[0, 1] = counts[:5, 2] = 5  # one client holds class 1, five hold class 2
    federation = Federation(names(10), ("often", "once", "half"), counts)
    outcome = try_choice(federation, Choice(RandomSelector, 1), rounds=400, seeds=[0])
    missed = outcome.row(federation)["missed"]
    assert list(missed) == ["once", "half"]
    assert missed["once"] == pytest.approx(0.9, abs=0.05)
    assert missed["half"] == pytest.approx(0.5, abs=0.08)
    assert outcome.row(federation)["rounds_missing_a_class"]["mean"] == pytest.approx(missed["once"])
    assert sum(outcome.times) == 400


def test_balanced_clients_are_told_that_random_is_as_good() -> None:
    counts = np.random.default_rng(1).multinomial(300, [0.25] * 4, size=30)
    plan = make_plan(counts, cohorts=["2", "4"], rounds=15, repetitions=2)
    assert plan.recommendation.is_random
    assert "take random selection" in plan.recommendation.reason
    assert plan.command().startswith("fedentopt select counts.csv --cohort 2 --selector random")
    assert "FedAvg(fraction_train=0.0666667, min_train_nodes=2" in plan.flower()


def test_one_class_is_nothing_to_balance() -> None:
    plan = make_plan([[3.0], [4.0]], rounds=5, repetitions=1)
    assert plan.recommendation.is_random
    assert plan.recommendation.reason.startswith("All samples are of one class")


def test_the_same_few_clients_every_round_are_not_recommended() -> None:
    """KL selection takes the same clients always, here perfectly even ones; FedEntOpt's are less even, and others'."""
    counts = np.concatenate([np.full((2, 4), 90.0), two_classes_each(30, 4)])
    plan = make_plan(counts, cohorts=["2"], rounds=40, repetitions=2, epsilon=["none"], away="0%")
    by_name = {o.choice.selector: o for o in plan.by_size if o.choice.buffer in (None, 16)}
    assert by_name[KLSelector].entropy == pytest.approx(2.0)
    assert by_name[KLSelector].entropy > by_name[EntropySelector].entropy
    assert plan.recommendation.chosen.choice.selector is not KLSelector
    assert plan.recommendation.chosen.never.mean() < 5


@pytest.mark.parametrize("cls", counts_only(), ids=lambda cls: cls.name)
@pytest.mark.parametrize("epsilon", [None, 0.123456789])
def test_the_command_and_the_lines_reproduce_the_figures(
    fedentopt: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cls: type[Selector], epsilon: float | None
) -> None:
    monkeypatch.chdir(tmp_path)
    counts = two_classes_each()
    source = write(tmp_path / "our counts.csv", counts).name
    federation = Federation(names(40), tuple(f"c{c}" for c in range(6)), counts)
    choice = Choice(cls, 5, 10 if has_buffer(cls) else None, epsilon)
    outcome = try_choice(federation, choice, rounds=12, seeds=[7, 8], settings=own_settings(cls))
    words = shlex.split(command(source, outcome, rounds=12, seed=7, noisy=False, drop=()))
    assert words[0] == "fedentopt"
    assert "--set" not in words  # all settings are at their defaults
    assert epsilon is None or float(words[words.index("--epsilon") + 1]) == epsilon
    said = fedentopt(*words[1:], "--json")
    assert said.code == 0, said.err
    document = json.loads(said.out)
    for name, value in outcome.first().items():
        assert document[name] == pytest.approx(value, abs=1e-12), name
    lines = python(source, outcome, seed=7, noisy=False, drop=()).splitlines()
    assert len(lines) <= 7
    scope: dict[str, object] = {}
    exec("\n".join(lines), scope)
    assert list(scope["cohort"].clients) == document["rounds"][0]["clients"]
    assert list(scope["selector"].select().clients) == document["rounds"][1]["clients"]


def test_the_lines_for_flower_build_the_strategy(skewed: Plan) -> None:
    pytest.importorskip("flwr")
    scope: dict[str, object] = {}
    exec(skewed.flower(), scope)
    best = skewed.recommendation.chosen.choice
    assert scope["strategy"].cohort_size == best.cohort
    assert scope["strategy"].selector.name == best.selector.name
    assert 'label-epsilon="none"' in skewed.flower()


def test_noise_and_its_cost() -> None:
    counts = two_classes_each()
    plan = make_plan(counts, cohorts=["5"], epsilon=["none", "2", "0.01"], away="0", rounds=25, repetitions=2)
    by_budget = {o.choice.epsilon: o for o in plan.noised(5)}
    assert list(by_budget) == [0.01, 2.0, None]
    assert by_budget[0.01].entropy < by_budget[None].entropy - 0.2
    samples = float(np.median(counts.sum(axis=1)))
    for budget in (2, 0.01):
        cost = by_budget[budget].entropy - by_budget[None].entropy
        assert f"by {cost:+.3f} bits with ε = {budget:g} (ε·n = " in plan.privacy
    assert f"n = {samples:g} samples per client" in plan.privacy
    assert "Down to ε = 2 at least 90 % of the gain" in plan.privacy
    assert plan.by_absence == ()
    assert plan.availability == ""


@pytest.mark.parametrize(
    ("kept", "verdict"),
    [
        ((1.0, 1.0, 0.5), " Down to ε = 1 at least 90 % of the gain over random selection stays."),
        ((1.0, 0.5, 1.0), " Down to ε = 2 at least 90 % of the gain over random selection stays."),
        ((1.0, 1.0, 1.0), " Down to ε = 0.5 at least 90 % of the gain over random selection stays."),
        ((0.5, 1.0, 1.0), ""),
        ((0.5, 0.5, 0.5), " None of these budgets keeps 90 % of the gain over random selection."),
    ],
)
def test_a_budget_is_affordable_where_all_larger_ones_are(skewed: Plan, kept: tuple, verdict: str) -> None:
    best = skewed.recommendation
    gained = best.chosen.entropy - best.random.entropy
    by_noise = [
        replace(
            best.chosen, choice=replace(best.chosen.choice, epsilon=budget),
            entropies=best.chosen.entropies - (1 - part) * gained,
        )
        for budget, part in zip((2.0, 1.0, 0.5), kept, strict=True)
    ]  # fmt: skip
    words = privacy_words(skewed.federation, best, skewed.by_size, by_noise, noisy=False)
    assert words.rpartition(").")[2] == verdict


def test_only_noise_is_recommended_with_noise() -> None:
    plan = make_plan(two_classes_each(), cohorts=["5"], epsilon=["1"], away="0", rounds=10, repetitions=1)
    best = plan.recommendation.chosen
    assert best.choice.epsilon == 1
    assert "--epsilon 1" in plan.command()
    assert "keyed_laplace(table.counts, 1, table.clients, seed=0)" in plan.python()
    assert "label-epsilon=1 label-report-file=" in plan.flower()
    assert {o.choice.epsilon for o in plan.noised(5)} == {None, 1.0}  # true counts beside, to tell what it costs


def test_noisy_counts_get_no_more_noise(fedentopt: Command, tmp_path: Path) -> None:
    counts = keyed_laplace(two_classes_each(), 0.5, names(40), 0)
    plan = make_plan(counts, noisy=True, cohorts=["5"], rounds=10, repetitions=1)
    assert plan.by_noise == ()
    assert plan.privacy.startswith("The counts hold noise already")
    assert "--noisy" in plan.command()
    with pytest.raises(InputError, match="--epsilon: adds noise to true counts"):
        make_plan(counts, noisy=True, epsilon=["1"])


def test_clients_away_are_not_asked() -> None:
    counts = two_classes_each(20)
    federation = Federation(names(20), tuple("abcdef"), counts)
    all_away_but_few = try_choice(federation, Choice(RandomSelector, 15, away=0.6), rounds=60, seeds=[0])
    assert all_away_but_few.cohort_clients == pytest.approx(8, abs=1)  # no more are there
    plan = make_plan(counts, cohorts=["4"], rounds=20, repetitions=1)
    assert {o.choice.away for o in plan.by_absence} == {0.2}
    assert {o.choice.selector for o in plan.by_absence} == {o.choice.selector for o in plan.by_size}
    assert "With 20 % of the clients away" in plan.availability
    # The same are away for every selector: it is a function of the seed and the round.
    again = make_plan(counts, cohorts=["4"], rounds=20, repetitions=1)
    assert [o.row(plan.federation) for o in plan.by_absence] == [o.row(plan.federation) for o in again.by_absence]


@pytest.fixture
def more_selectors() -> Iterator[None]:
    class Newest(RandomSelector):
        """One that was added later."""

    class Small(Selector):
        """One for few clients."""

        largest = 10

        def pick(self, available: np.ndarray, losses: np.ndarray | None) -> list[int]:
            raise AssertionError("asked for too many clients")

    class Incomplete(Selector):
        """One that needs what is not installed."""

        def pick(self, available: np.ndarray, losses: np.ndarray | None) -> list[int]:
            raise ImportError("No module named 'clusters'")

    class Choosy(Selector):
        """One that refuses."""

        @classmethod
        def check_run(cls, *, cohort_size: int, clients: int, **settings: object) -> None:
            if cohort_size > 4:
                raise InputError(f"cohort_size: {cohort_size}; accepted: at most 4")

        def pick(self, available: np.ndarray, losses: np.ndarray | None) -> list[int]:
            return available[: self.cohort_size].tolist()

    for cls in (Newest, Small, Incomplete, Choosy):
        SELECTORS.register(f"test-{cls.__name__.lower()}", label=cls.__name__)(cls)
    yield
    for name in [name for name in SELECTORS.names if name.startswith("test-")]:
        del SELECTORS._classes[name]


@pytest.mark.usefixtures("more_selectors")
def test_selectors_come_from_the_registry_and_those_that_cannot_say_why() -> None:
    counts = two_classes_each(20)
    plan = make_plan(counts, cohorts=["3", "6"], rounds=5, repetitions=1, epsilon=["none"])
    tried = {(o.choice.selector.name, o.choice.cohort) for o in plan.by_size}
    assert {("test-newest", 3), ("test-newest", 6), ("test-choosy", 3)} <= tried
    reasons = {(one.selector, one.cohort): one.reason for one in plan.skipped if one.selector.startswith("test-")}
    assert reasons == {
        ("test-small", None): "serves at most 10 clients",
        ("test-incomplete", 3): "No module named 'clusters'",
        ("test-choosy", 6): "cohort_size: 6; accepted: at most 4",
    }


def test_large_tables_are_sampled_and_say_so() -> None:
    big = Federation(names(1), ("a",) * 10, np.broadcast_to(np.ones(10), (100_000, 10)))
    rounds, repetitions, said = amount_of_work(big, [3, 5, 10], 12, None, None)
    assert 10 <= rounds < 100
    assert repetitions >= 2
    assert said is not None
    assert f"{rounds} rounds and {repetitions} repetitions" in said
    assert "100000 clients" in said
    assert amount_of_work(big, [3], 12, 50, 4) == (50, 4, None)  # what is asked for is done
    for clients, most in ((3, [1, 2]), (200, [2, 10, 20, 60, 100])):
        small = Federation(names(clients), ("a",) * 10, np.ones((clients, 10)))
        assert amount_of_work(small, most, 16, None, None) == (100, 3, None)
    assert amount_of_work(Federation(names(201), ("a",) * 10, np.ones((201, 10))), [2, 100], 16, None, None)[2]

    counts = np.tile(two_classes_each(), (150, 1))  # 6000 clients
    plan = make_plan(counts, cohorts=["4"], rounds=2, repetitions=1, epsilon=["none"], away="0")
    assert "the rounds tried reach at most 8 of 6000 clients" in plan.recommendation.reason


def test_what_takes_long_is_left_out_by_sizes_and_not_by_a_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = np.tile(two_classes_each(), (210, 1))  # 8400 clients
    few = {"cohorts": ["20"], "rounds": 1, "repetitions": 2, "epsilon": ["none"]}
    ticks = iter(range(0, 10**9, 1000))  # a clock by which everything takes long, as on a busy machine
    quick = make_plan(counts, **few)
    monkeypatch.setattr("time.monotonic", lambda: float(next(ticks)))
    slow = make_plan(counts, **few)
    assert json.dumps(quick.to_json(), default=float) == json.dumps(slow.to_json(), default=float)
    assert all(len(outcome.entropies) == 2 for outcome in (*slow.by_size, *slow.by_absence))

    monkeypatch.setattr("fedentopt.plan.trying.LONGEST", 0.0)
    plan = make_plan(counts, **few)
    assert {o.choice.selector for o in plan.by_size} == {RandomSelector, EntropySelector}
    reasons = {one.selector: one.reason for one in plan.skipped}
    assert set(reasons) == {cls.name for cls in counts_only()} - {"random", "fedentopt"}
    assert "estimated from the sizes of the table" in reasons["kl"]
    assert "without --all" in reasons["kl"]
    wanted = make_plan(counts, **few, everything=True)
    assert {one.selector for one in wanted.skipped} == {"clustered-label"}  # which cannot serve so many
    small = make_plan(two_classes_each(), **few)  # of a small table nothing is left out, whatever it takes
    assert not small.skipped


def test_estimates_grow_with_what_makes_selectors_slow() -> None:
    counts = np.tile(two_classes_each(), (25, 1))
    federation = Federation(names(1000), tuple("abcdef"), counts)
    larger = Federation(names(4000), tuple("abcdef"), np.tile(counts, (4, 1)))
    for cls in counts_only():
        taken = seconds(federation, Choice(cls, 5), 10)
        assert seconds(larger, Choice(cls, 5), 10) >= taken
        assert seconds(federation, Choice(cls, 5), 40) >= taken
        assert seconds(federation, Choice(cls, 5, away=0.2), 10) >= taken
        assert taken > 0 or cls is RandomSelector


def test_a_choice_that_takes_long_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedentopt.plan.trying.PATIENCE", 0.0)
    plan = make_plan(two_classes_each(), cohorts=["4"], rounds=2, repetitions=3, epsilon=["none"], away="0")
    many = {o.choice.selector: len(o.entropies) for o in plan.by_size}
    assert many.pop(RandomSelector) == many.pop(EntropySelector) == 3
    assert set(many.values()) == {1}


def test_trials_read_the_table_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    usual = CountTable.register
    monkeypatch.setattr(CountTable, "register", lambda self, *a, **k: (read.append(1), usual(self, *a, **k))[1])
    budgets = ["none", "1", "0.5"]
    make_plan(two_classes_each(), cohorts=["3", "5"], rounds=2, repetitions=2, epsilon=budgets, away="10%")
    assert len(read) == 1 + 2 * 2  # the counts, and those with noise for each budget and seed, for all sizes


def test_noise_that_takes_long_is_tried_with_the_recommended_size_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedentopt.plan.trying.LARGE", 0)
    asked = {"cohorts": ["3", "6"], "rounds": 2, "repetitions": 1, "epsilon": ["none", "1"], "away": "0"}
    assert [o.choice.cohort for o in make_plan(two_classes_each(), **asked).by_noise] == [3, 6]
    monkeypatch.setattr("fedentopt.plan.trying.LONGEST_NOISE", 0.0)
    plan = make_plan(two_classes_each(), **asked)
    size = plan.recommendation.chosen.choice.cohort
    assert [o.choice.cohort for o in plan.by_noise] == [size]
    assert f"noise with other cohorts than {size}" in plan.skipped[-1].reason
    assert plan.privacy
    assert len(make_plan(two_classes_each(), **asked, everything=True).by_noise) == 2


def test_a_log_says_how_far_a_large_plan_is(
    fedentopt: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "counts.csv", two_classes_each())
    options = ["plan", str(file), "--cohort", "4", "--rounds", "2", "--out", str(tmp_path / "p.html")]
    assert "tried" not in fedentopt(*options).err  # done before anybody looks
    monkeypatch.setattr("fedentopt.cli.plan.LARGE_FILE", 0)
    monkeypatch.setattr("fedentopt.cli.plan.PAUSE", 0.0)
    lines = fedentopt(*options).err.splitlines()
    assert lines[0].startswith("reading ")
    assert lines[1] == "0% tried; now Random, M = 4"
    assert re.fullmatch(r"\d+% tried, about \d+ s left; now .+, clients away", lines[-1])


def test_sizes_by_hand() -> None:
    federation = Federation(names(40), tuple("abcdef"), two_classes_each())
    assert cohort_sizes(federation, None) == [3, 4, 5, 6, 9, 15]  # 6 classes, 2 per client; and 10 %
    assert cohort_sizes(federation, ["10%", "7"]) == [4, 7]
    assert [cohort_sizes(Federation(names(k), ("a",), np.ones((k, 1))), None) for k in (1, 2, 3)] == [[1], [1], [2]]
    assert buffer_sizes(10, 40, None) == [0, 10, 20, 30]
    assert buffer_sizes(15, 40, None) == [0, 10, 20]
    assert that_differ([0, 10, 20, 30], 3, 4) == [0, 10, 20]  # twelve picks fill no buffer of 20
    assert epsilons(["0.5", "none", "2"]) == [None, 2.0, 0.5]
    assert [away_share(text) for text in ("20%", "0.2", "0")] == [0.2, 0.2, 0.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cohorts": ["0"]}, "--cohort: 0 gives"),
        ({"cohorts": ["50"]}, "accepted: 1 to 20 clients"),
        ({"cohorts": ["many"]}, "--cohort: 'many' is neither a number"),
        ({"cohorts": ["15"], "buffers": ["10"]}, "--buffer: 10 leaves no room for cohorts of 15 among 20 clients"),
        ({"epsilon": ["much"]}, "--epsilon: 'much'; accepted"),
        ({"epsilon": ["0"]}, "--epsilon: '0'; accepted: numbers above 0"),
        ({"away": "100%"}, "--away: '100%'; accepted"),
        ({"away": "some"}, "--away: 'some'"),
        ({"clients": ["a"]}, "do not name a table"),
        ({"epsilon": ["1e-300"]}, "epsilon: 1e-300 gives noise"),
        ({"cohorts": 50}, "--cohort: 50 gives [50]; accepted: 1 to 20 clients"),
        ({"cohorts": [15], "buffers": [10]}, "--buffer: 10 leaves no room"),
        ({"buffers": []}, "--buffer: an empty list; accepted: one or several"),
        ({"epsilon": [0.0]}, "--epsilon: '0.0'; accepted: numbers above 0"),
        ({"epsilon": []}, "--epsilon: an empty list; accepted: one or several"),
        ({"away": 1.0}, "--away: '1.0'; accepted"),
        ({"rounds": 0}, "rounds: 0 is out of range; accepted: a whole number, at least 1"),
        ({"repetitions": 1.5}, "repetitions: 1.5 is out of range"),
        ({"seed": -1}, "seed: -1 is out of range"),
    ],
)
def test_bad_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(InputError) as caught:
        make_plan(two_classes_each(20), **{"rounds": 2, "repetitions": 1, **options})
    assert message in str(caught.value)


def test_a_data_frame_names_clients_and_classes() -> None:
    table, amount = two_classes_each(20), {"cohorts": 4, "rounds": 2, "repetitions": 1}
    clients, classes = [f"site {i}" for i in range(20)], [f"kind {i}" for i in range(table.shape[1])]
    frame = pd.DataFrame(table, index=clients, columns=classes)
    plan = make_plan(frame, **amount)
    assert (plan.federation.clients, plan.federation.classes) == (tuple(clients), tuple(classes))
    assert plan.to_json() == make_plan(table, clients=clients, classes=classes, **amount).to_json()
    assert make_plan(frame, clients=clients[::-1], **amount).federation.clients == tuple(clients[::-1])


def test_numbers_say_the_same_as_text() -> None:
    table, amount = two_classes_each(20), {"rounds": 2, "repetitions": 1}
    text = make_plan(table, cohorts=["12"], buffers=["3"], epsilon=["none", "0.5"], away="20%", **amount)
    for cohorts, buffers, epsilon in (
        (12, 3, [None, 0.5]),
        ("12", "3", "none, 0.5"),
        ([12], (3,), np.array([None, 0.5])),
    ):
        plan = make_plan(table, cohorts=cohorts, buffers=buffers, epsilon=epsilon, away=0.2, **amount)
        assert plan.to_json() == text.to_json()
    assert text.settings["cohorts"] == [12]
    once = make_plan(table, cohorts=[4, 6], buffers=(size for size in (3, 5)), **amount)
    assert once.settings["buffers"] == [3, 5]


@pytest.mark.parametrize("counts", [[[1, -1]], [[0, 0], [1, 2]], [[1, np.nan]], [1, 2], [["a"]], np.zeros((0, 3))])
def test_bad_counts_are_refused(counts: object) -> None:
    with pytest.raises(InputError):
        make_plan(counts, rounds=2)


def test_large_numbers_are_written_out(tmp_path: Path) -> None:
    """Counts of millions, and hundreds of clients that few rounds cannot ask."""
    counts = two_classes_each(300) * 123_457
    plan = make_plan(counts, cohorts=["150"], buffers=["0"], epsilon=["none", "1"], rounds=2, repetitions=1)
    page = re.sub(r"<(script|style).*?</\1>", "", write_page(plan, tmp_path / "plan.html").read_text(), flags=re.DOTALL)
    shown = re.sub(r"<[^>]+>", " ", page)
    assert not re.findall(r".{20}\de\+\d", shown + plan.privacy + plan.recommendation.reason)
    assert f"n = {plan.samples:,.0f} samples per client" in plan.privacy
    assert f" {counts[0].sum():,.0f} " in shown


# --- how sure a recommendation is
def test_a_choice_that_hangs_on_the_draw_is_called_a_close_call() -> None:
    """What each repetition leads to is what it leads to as a plan of its own."""
    counts = np.random.default_rng(3).dirichlet(np.full(6, 0.2), 24) * 90
    settings = {"cohorts": [3, 4, 6], "buffers": [0, 6], "epsilon": "none", "away": 0.0, "rounds": 30}
    plan = make_plan(np.round(counts).astype(int), repetitions=4, seed=0, **settings)
    alone = []
    for seed in range(4):
        chosen = make_plan(np.round(counts).astype(int), repetitions=1, seed=seed, **settings).recommendation.chosen
        alone.append((describe(chosen), chosen.choice.cohort))
    together = (describe(plan.recommendation.chosen), plan.recommendation.chosen.choice.cohort)
    others = Counter(one for one in alone if one != together)
    said = "".join(
        f"{f', {times}' if place else ''} to {what} and cohorts of {size}"
        for place, ((what, size), times) in enumerate(others.most_common())
    )
    most = max(others.values())
    by = "itself, 1 of 4 repetitions leads" if most == 1 else f"themselves, {most} of 4 repetitions lead"
    assert others, "a table on which the draw decides"
    assert plan.recommendation.trade.endswith(f" A close call: by {by}{said}.")


def test_a_clear_choice_is_not_called_close() -> None:
    counts = np.kron(np.eye(4, dtype=int), np.full((5, 1), 50))  # a class per client
    plan = make_plan(counts, cohorts=[4], buffers=[0], epsilon="none", away=0.0, rounds=20, repetitions=3)
    assert "close call" not in plan.recommendation.trade
