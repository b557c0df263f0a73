"""The benchmark of selectors: its cells, its comparisons by hand, its page and figure from small results."""

from __future__ import annotations

import csv
import dataclasses
import re
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from command_line import commander
from fedentopt.errors import InputError
from fedentopt.paper.blocks import cells_from_file, selector_cells
from fedentopt.paper.cells import Cell, distinct_runs, select
from fedentopt.paper.comparison import Comparison, compare
from fedentopt.paper.exported import export, read_exported
from fedentopt.paper.figures import write_figures
from fedentopt.paper.formats import markdown
from fedentopt.paper.measures import Measured, Results, settings_key
from fedentopt.paper.reproduction import plan_cells
from fedentopt.paper.selector_asks import ask
from fedentopt.paper.selector_figure import _ceiling as ceiling
from fedentopt.paper.selector_overall import gap_closed, over_settings
from fedentopt.paper.selector_page import selector_page
from fedentopt.paper.selector_table import TUNED, bench_settings
from fedentopt.paper.selector_tuned import with_tuned
from fedentopt.paper.tables import tables
from fedentopt.results.statistics import holm, paired_p_value
from fedentopt.selection import SELECTORS

CELLS = selector_cells()
MAIN = [cell for cell in CELLS if cell.table == "selectors"]
MIXED = "mixed:0.001,0.002,0.005,0.01,0.5"
HERE = [c for c in MAIN if c.dataset == "cifar10" and c.partition == "dir:0.1" and c.participation in (10, 100)]


def measured(cell: Cell, seed: int, accuracy: float, **more: Any) -> tuple[tuple[str, int], Measured]:
    assert cell.config is not None
    key = settings_key(cell.config)
    given = {
        "h_norm": 0.9, "never_selected": 2, "mean_entropy": 3.0, "min_entropy": 2.5, "worst_class_accuracy": 20.0,
        "rounds_to_30": 50, "rounds_to_40": 100, "rounds_to_20": 20, "rounds_to_10": 5, "bytes_up": 500_000_000,
        "bytes_down": 1_000_000_000, "asked": 0, "selection_seconds": 0.5, "simulated_seconds": 3000.0, **more,
    }  # fmt: skip
    return (key, seed), Measured(settings=key, seed=seed, rounds=cell.config.rounds, accuracy=accuracy, **given)


def results(accuracies: dict[str, list[float]], cells: list[Cell] = HERE, **more: Any) -> Results:
    """Runs of these methods over seeds 0, 1, ..., and a ceiling of 60 %."""
    found = []
    for cell in cells:
        if cell.participation == 100:
            found += [measured(cell, seed, 60.0) for seed in cell.seeds]
        elif cell.method in accuracies:
            found += [measured(cell, seed, value, **more) for seed, value in enumerate(accuracies[cell.method])]
    return Results(None, dict(found))


def compared(accuracies: dict[str, list[float]], **more: Any) -> list[Comparison]:
    return compare(HERE, results(accuracies, **more), lambda name: True)


RANDOM = [50.0, 51.0, 49.0, 50.0, 50.0]
OURS = [54.0, 55.2, 53.1, 54.0, 54.1]
CBS = [55.0, 56.1, 54.2, 55.0, 55.3]
KL = [49.0, 52.0, 48.0, 51.0, 49.5]
SOME = {"random": RANDOM, "fedentopt": OURS, "fed-cbs": CBS, "kl": KL}


def test_every_selector_is_in_every_setting() -> None:
    names = {cell.method for cell in MAIN}
    assert names == set(SELECTORS.names)  # one that is registered later belongs here too
    per_setting = Counter((c.dataset, c.swept, c.partition, c.participation) for c in MAIN if c.participation != 100)
    assert set(per_setting.values()) == {len(SELECTORS.names)}
    fine = (("fine_labels", True),)
    coarse = (("fine_labels", False),)
    data = [("cifar10", (), p) for p in ("dir:0.1", "dir:0.5", "classes:2", MIXED, "shards:2")]
    data += [("cifar100", kind, p) for kind in (coarse, fine) for p in ("dir:0.1", "classes:2")]
    assert set(per_setting) == {(*one, share) for one in data for share in (4, 10)}
    ceilings = [c for c in MAIN if c.participation == 100]
    assert {(c.dataset, c.swept, c.partition) for c in ceilings} == set(data)
    assert {c.method for c in ceilings} == {"random"}


def test_cells_share_everything_but_their_selector() -> None:
    for cell in MAIN:
        assert cell.config is not None
        assert cell.reference is not None
        apart = {"selector", "buffer", "cohort"}
        own, random = cell.config.to_dict(), cell.reference.to_dict()
        differing = {name for name in own.keys() | random.keys() if own.get(name) != random.get(name)}
        assert {name for name in differing if not name.startswith("selector.")} <= apart
        assert cell.config.speed_spread == 0.5
        assert cell.config.validation == 0
        if cell.participation != 100:
            assert cell.seeds == (0, 1, 2, 3, 4)


@pytest.mark.parametrize("method", ["fedentopt", "fedentopt-swap"])
def test_both_buffers_follow_the_partition(method: str) -> None:
    found = {c.partition: c.buffer for c in MAIN if c.method == method and c.dataset == "cifar10"}
    assert found == {"dir:0.1": 50, "dir:0.5": 50, "classes:2": 70, MIXED: 50, "shards:2": 70}
    for cell in (c for c in MAIN if c.method == method):
        assert cell.config is not None
        assert cell.config.of("selector")["buffer"] == f"{cell.buffer:g}%"


def test_the_grid_is_the_same_for_all_and_never_sees_the_test_split() -> None:
    grid = [cell for cell in CELLS if cell.table == "selectors-tuning"]
    assert all(cell.extra and cell.metric == "validation_accuracy" for cell in grid)
    assert {seed for cell in grid for seed in cell.seeds}.isdisjoint({0, 1, 2, 3, 4})
    for cell in grid:
        assert cell.config is not None
        assert cell.reference is not None
        assert cell.config.validation == cell.reference.validation == 0.1
    per_method = Counter(cell.method for cell in grid if cell.partition == "dir:0.1")
    assert set(per_method) == set(SELECTORS.names)
    assert set(per_method.values()) <= {1, 3}  # three values, or nothing to choose
    tuned = {method for method, number in per_method.items() if number == 3}
    for method in tuned:  # the published default is among them
        default = next(c for c in MAIN if c.method == method and c.participation == 10 and c.partition == "dir:0.1")
        ours = [c for c in grid if c.method == method and c.partition == "dir:0.1"]
        assert default.config is not None
        varied = ours[0].swept[0][0].removeprefix("selector.") if ours[0].swept else "buffer"
        published = default.config.of("selector")[varied]
        meant = {"d": 20, "clusters": 10}.get(varied, published) if published is None else published
        assert meant in [cell.config.of("selector")[varied] for cell in ours if cell.config is not None]


def test_algorithms_go_with_and_without_our_selection() -> None:
    own = {cell.method for cell in CELLS if cell.table == "selectors-algorithms"}
    algorithms = {"feddisco", "balanced-softmax", "fedavgm", "feddyn", "scaffold"}
    assert own == {"fedavg", "fedentopt", *algorithms, *(f"{name}+fedentopt" for name in algorithms)}
    scaffold = next(cell for cell in CELLS if cell.method == "scaffold+fedentopt")
    assert scaffold.config is not None
    assert scaffold.config.of("algorithm")["variant"] == "gradient"


def test_the_benchmark_is_no_part_of_the_paper() -> None:
    paper, inner = plan_cells(None, "all")
    assert inner == "all"
    assert not {cell.table for cell in paper} & {cell.table for cell in CELLS}
    plan, inner = plan_cells(None, "selectors")
    assert {cell.table for cell in select(plan, inner)} == {"selectors", "selectors-algorithms", "selectors-averaging"}
    plan, inner = plan_cells(None, "selectors-tuning")
    assert {cell.table for cell in select(plan, inner)} == {"selectors-tuning"}
    plan, inner = plan_cells(None, "selectors-tuning,selectors")
    assert len({cell.table for cell in select(plan, inner)}) == 4
    with pytest.raises(InputError, match="'table1' and 'selectors' have results and pages of their own"):
        plan_cells(None, "table1,selectors")


def test_an_unknown_selector_in_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "cells.toml"
    file.write_text(
        '[[cells]]\ntable = "selectors"\nmetric = "accuracy"\nmodel = "lenet5"\ndataset = "digits"\n'
        'partition = "dir:0.1"\nmethod = ["random", "no-such"]\n'
    )
    with pytest.raises(InputError, match=r"block 1: .*'no-such' is unknown"):
        cells_from_file(file)


@pytest.mark.parametrize("method", ["fedavg", "fedprox+kl", "fedentopt-dp", "test_selectors:Own"])
def test_a_table_of_selectors_takes_no_other_method(method: str, tmp_path: Path) -> None:
    file = tmp_path / "cells.toml"
    cell = (
        '[[cells]]\ntable = "{}"\nmetric = "accuracy"\nmodel = "lenet5"\ndataset = "digits"\npartition = "dir:0.1"\n'
        'participation = 10\nmethod = ["random", "{}"]\n'
    )
    file.write_text(cell.format("selectors", method))
    with pytest.raises(InputError, match=f"block 1: method: '{re.escape(method)}' is no selector, and the table 'sel"):
        cells_from_file(file)
    file.write_text(cell.format("mine", method))
    assert [found.method for found in cells_from_file(file)] == ["random", method]


def test_comparisons_are_paired_and_adjusted_over_the_setting() -> None:
    (setting,) = [s for s in bench_settings(compared(SOME)) if s.by_method]
    assert list(setting.by_method) == ["random", "fedentopt", "kl", "fed-cbs"]
    by_seed = [dict(enumerate(own)) for own in (OURS, KL, CBS)]
    raw = [paired_p_value(own, dict(enumerate(RANDOM))) for own in by_seed]
    adjusted = holm(raw)
    found = setting.against_random
    assert [found[method].p for method in ("fedentopt", "kl", "fed-cbs")] == adjusted
    assert found["fedentopt"].interval is not None
    assert found["fedentopt"].interval.mean == pytest.approx(sum(OURS) / 5 - sum(RANDOM) / 5)
    assert found["fedentopt"].clear
    assert found["fed-cbs"].clear
    assert not found["kl"].clear
    against_ours = setting.against_ours
    assert set(against_ours) == {"random", "kl", "fed-cbs"}
    assert against_ours["fed-cbs"].clear
    assert setting.ceiling is not None
    assert setting.ceiling.ours == 60.0
    assert setting.targets == (40, 45)


def test_targets_are_those_that_random_selection_reaches() -> None:
    never = {"rounds_to_40": None, "rounds_to_45": None, "rounds_to_50": None}
    (setting,) = [s for s in bench_settings(compared(SOME, **never)) if s.by_method]
    assert setting.targets == (30, 40)
    none = never | {"rounds_to_30": None, "rounds_to_20": None, "rounds_to_10": None}
    (setting,) = [s for s in bench_settings(compared(SOME, **none)) if s.by_method]
    assert setting.targets == (10, 20)


def test_the_table_has_every_column_by_hand() -> None:
    (table,) = tables([entry for entry in compared(SOME, asked=10_000) if entry.ours is not None])
    (section,) = table.sections
    assert section.heading == "LeNet-5, CIFAR-10, Dir(0.1), 10 % per round (targets 40 % and 45 %)"
    assert [row[0] for row in section.rows] == ["Fed-CBS", "FedEntOpt", "Random", "KL", "all clients (ceiling)"]
    first = dict(zip(table.columns, section.rows[0], strict=True))
    assert first["accuracy"] == "55.12 ± 0.68"
    assert re.fullmatch(r"\*\*\+5\.12 \[\+4\.\d+, \+5\.\d+\]\*\*", first["against random, 95 % interval"])
    assert (first["worst class"], first["rounds to lower target"], first["rounds to higher target"]) == (
        "20.0", "100", "– (0 of 5)"
    )  # fmt: skip
    assert (first["cohort entropy, mean"], first["H_norm"]) == ("3.000", "0.900")
    assert first["cohort entropy, worst round"] == "2.500"
    assert (first["never chosen"], first["asked per round"], first["MB per round"]) == ("2.0", "20.0", "3.00")
    assert (first["selection (ms per round)"], first["simulated minutes"], first["seeds"]) == ("1.00", "50.00", "5")
    assert section.rows[-1][1] == "60.00 ± 0.00"
    assert section.rows[2][2] == "–"  # random selection is compared with nothing


def test_what_each_asks_comes_from_its_declarations() -> None:
    assert ask("random").words == "nothing"
    assert ask("fedentopt").words == "its label counts, once"
    assert ask("clustered-size").words == "its number of samples, once"
    burdens = [ask(name).burden for name in ("random", "clustered-size", "fed-cbs", "rpow-d", "pow-d", "hics-fl")]
    assert burdens == [0, 1, 2, 3, 4, 5]
    assert "how long it trained" in ask("oort").words
    assert ask("inferred").size == "in its model; 4 + 4 C and a model, once", "the census travels too"
    assert not any("census" in ask(name).words for name in SELECTORS.names if name != "inferred")


def page(entries: list[Comparison]) -> str:
    return selector_page(entries, commands=[], remarks="", figures={})


def test_the_page_says_first_where_we_are_not_best() -> None:
    text = page(compared(SOME))
    headings = re.findall(r"^## (.*)$", text, flags=re.MULTILINE)
    assert headings[0] == "Where FedEntOpt is not best"
    assert (
        "highest mean accuracy in 0 of 1 setting (LeNet-5, 5 seeds); elsewhere selectors of others (Fed-CBS in 1). Of"
        in text
    )
    assert "Fed-CBS does best: on average +1.04 points from FedEntOpt, above it in 1 of 1 setting." in text
    assert "Of 3 comparisons with another selector, the other is clearly better in 1, FedEntOpt in 2; the rest" in text
    assert "of 3, the first has to be 4.0 times its standard error with 5 seeds" in text  # t(1 - 0.05/6, 4) = 3.96
    assert "- Fed-CBS: CIFAR-10, Dir(0.1), 10 %" in text
    assert "| CIFAR-10, Dir(0.1), 10 % | Fed-CBS | 55.12 | 54.08 | **+1.04 " in text
    assert "| KL | -0.10 | -4.18 | – | 0 of 1 | 0 | label counts | 0 / 0 | 0 / 1 |" in text
    assert "worth +9.5 points over random selection at 10 %, of which FedEntOpt brings +4.1 (43 %)." in text


def test_the_page_says_so_where_we_are_best() -> None:
    text = page(compared(SOME | {"fed-cbs": [value - 3 for value in CBS]}))
    assert "highest mean accuracy in 1 of 1 setting (LeNet-5, 5 seeds). Of the selectors" in text
    assert "Fed-CBS does best: on average -1.96 points from FedEntOpt, above it in 0 of 1 setting." in text
    assert "In no setting has another selector the higher mean." in text


def test_one_seed_gives_differences_and_no_certainty() -> None:
    text = page(compared({method: values[:1] for method, values in SOME.items()}))
    assert "One seed says nothing about luck" in text
    assert "clearly better" not in text
    assert "| CIFAR-10, Dir(0.1), 10 % | Fed-CBS | 55.00 | 54.00 | +1.00 | – |" in text
    assert "| Fed-CBS | +5.00 | +1.00 | – | 1 of 1 | 1 | label counts | – | – |" in text
    assert re.search(r"^\| Fed-CBS \| 55\.00 \| \+5\.00 \| – \|", text, re.MULTILINE)


def test_seeds_that_only_some_have_finished_favour_nobody() -> None:
    """Fed-CBS has only the seed in which everybody is good; there FedEntOpt is better."""
    lucky = {"random": [50.0, 40.0], "fedentopt": [55.0, 45.0], "kl": [50.5, 40.5], "fed-cbs": [54.0]}
    (setting,) = [s for s in bench_settings(compared(lucky)) if s.by_method]
    assert max(setting.by_method, key=lambda method: setting.by_method[method].ours or 0.0) == "fed-cbs"
    assert setting.best == "fedentopt"
    assert "(LeNet-5, 1 to 2 seeds)." in page(compared(lucky))


def test_over_settings_a_selector_is_judged_by_the_signs_and_ranks_of_its_differences() -> None:
    """Six settings, all below FedEntOpt: 2 of 2^6 sign patterns are as extreme, p = 1/32; Holm doubles the smaller."""
    cells = [c for c in MAIN if c.participation == 10 and c.dataset == "cifar10"]
    cells += [c for c in MAIN if c.participation == 4 and c.dataset == "cifar10" and c.partition == "dir:0.1"]
    places = list(dict.fromkeys((c.partition, c.participation) for c in cells))
    assert len(places) == 6
    found = []
    for cell in cells:
        place = 1 + places.index((cell.partition, cell.participation))
        gap = {"fedentopt": 0.0, "fed-cbs": -0.1 * place, "kl": 0.1 * place * (-1) ** place}.get(cell.method or "")
        if gap is not None:
            found.append(measured(cell, 0, 50 + gap))
    settings = bench_settings(compare(cells, Results(None, dict(found)), lambda name: True))
    p_values = over_settings(settings)
    assert p_values["fed-cbs"] == pytest.approx(2 / 32)
    # Signs - + - + - + on ranks 1 to 6: W = min(9, 12) = 9, and 54 of 64 patterns are as extreme.
    assert p_values["kl"] == pytest.approx(54 / 64)


def test_the_page_without_results_names_the_command() -> None:
    text = page(compare(CELLS, Results(), lambda name: True))
    assert "There are none yet" in text
    assert "fedentopt reproduce selectors --device cuda --known results/selectors --export results/selectors" in text
    assert "| Random | nothing | 0 |" in text


def test_algorithms_are_compared_with_the_same_selection() -> None:
    own = [cell for cell in CELLS if cell.table == "selectors-algorithms" and cell.partition == "dir:0.1"]
    values = {"fedavg": 50.0, "fedentopt": 55.0, "feddisco": 52.0, "feddisco+fedentopt": 55.5}
    found = [
        measured(cell, seed, values[cell.method] + noise)
        for cell in own if cell.method in values
        for seed, noise in enumerate((0.0, 0.3, -0.2))
    ]  # fmt: skip
    text = page(compare(own, Results(None, dict(found)), lambda name: True))
    assert "| FedAvg | 50.03 ± 0.25 | – | 55.03 ± 0.25 | – |" in text
    assert "Dir(0.1): 1 of 1 (clearly FedDisco) with random selection, 1 of 1 (clearly FedDisco) with Fed" in text
    assert (
        "Highest of all: FedDisco with FedEntOpt's selection, 55.53, above FedAvg with it in 3 of 3 seeds; with "
        in text
    )
    assert "with random selection it has 52.03." in text
    assert "variant=gradient" not in text  # no result of SCAFFOLD's is shown
    assert "| FedDisco | 52.03 ± 0.25 | **+2.00 [+2.00, +2.00]** | 55.53 ± 0.25 | **+0.50 [+0.50, +0.50]** |" in text


def algorithm_page(values: dict[str, list[float]]) -> str:
    own = [cell for cell in CELLS if cell.table == "selectors-algorithms" and cell.partition == "dir:0.1"]
    found = [measured(c, seed, v) for c in own for seed, v in enumerate(values.get(c.method or "", []))]
    return page(compare(own, Results(None, dict(found)), lambda name: True))


def test_the_highest_of_the_algorithms_is_that_of_the_seeds_all_have() -> None:
    """In seed 0, the only one that all have, SCAFFOLD leads; over their own seeds FedAvgM would."""
    values = {"fedavg": [50.0], "fedentopt": [55.0], "scaffold": [58.0], "fedavgm+fedentopt": [57.0, 99.0]}
    text = algorithm_page(values)
    assert "Highest of all: SCAFFOLD with random selection, 58.00, above FedAvg with it in 1 of 1 seeds." in text
    assert "SCAFFOLD's correction enters the gradient (`variant=gradient`), not after the step" in text
    assert "Highest of all" not in algorithm_page(values | {"fedentopt": [60.0]})


def test_the_setting_that_carries_a_mean_is_named() -> None:
    cells = [cell for cell in MAIN if cell.dataset == "cifar10" and cell.participation == 10]
    gains = {"dir:0.1": 4.0, "dir:0.5": 0.0, "classes:2": 1.0, MIXED: 15.0, "shards:2": 3.0}
    found = [
        measured(cell, 0, 40.0 + (gains[cell.partition or ""] if cell.method == "fedentopt" else 0.0))
        for cell in cells if cell.method in ("random", "fedentopt", "kl")
    ]  # fmt: skip
    text = page(compare(cells, Results(None, dict(found)), lambda name: True))
    assert (
        "FedEntOpt's largest gain: at 10 % +15.0 (CIFAR-10, mixed Dirichlet), on average +2.00 in the others." in text
    )
    assert "One setting can carry" not in page(compared(SOME))


# --- averaged by samples
AVERAGED = [cell for cell in CELLS if cell.table == "selectors-averaging"]


def test_selectors_with_weights_of_their_own_are_run_without_them_too() -> None:
    weighted = {name for name in SELECTORS.names if SELECTORS.get(name).own_weights}
    assert Counter(c.dataset for c in AVERAGED) == {"cifar10": len(weighted), "cifar100": len(weighted)}
    assert {cell.method for cell in AVERAGED} == weighted
    main = {cell.config for cell in MAIN}
    for cell in AVERAGED:
        assert cell.config is not None
        assert cell.config not in main
        assert dataclasses.replace(cell.config, averaging="selector") in main, "own weights have another run than there"
        assert cell.reference in main, "random selection has another run than there"
    runs = distinct_runs(AVERAGED)
    assert len(runs) == 70
    assert not {run.run_id for run in runs} & {run.run_id for run in distinct_runs(MAIN)}


def averaged_page(own: list[float], samples: list[float], random: list[float] = RANDOM) -> str:
    """Of pow-d, which has the same figures on both data sets."""
    cells = [c for c in MAIN if c.participation == 10 and c.partition == "dir:0.1"] + AVERAGED
    values = {"selectors": {"pow-d": own, "random": random}, "selectors-averaging": {"pow-d": samples}}
    found = [measured(c, s, v) for c in cells for s, v in enumerate(values[c.table].get(c.method or "", []))]
    text = page(compare(cells, Results(None, dict(found)), lambda name: True))
    assert "## Selectors with weights of their own" not in text  # no second table of the same
    return text.partition("## Selection or weights?\n")[2].partition("\n## ")[0]


def test_the_page_divides_a_gain_into_selection_and_weights() -> None:
    by_samples = [50.1, 51.4, 49.0, 49.9, 50.6]  # +0.2 over random selection
    own = [value + 3 + extra for value, extra in zip(by_samples, (0.0, 0.2, -0.2, 0.1, -0.1), strict=True)]
    text = averaged_page(own, by_samples)
    assert re.findall(r"^### (.*)$", text, re.MULTILINE) == [
        "CIFAR-10, Dir(0.1), 10 %", "CIFAR-100 (20 classes), Dir(0.1), 10 %"
    ]  # fmt: skip
    row = (
        "| Power-of-choice | 53.20 ± 1.01 | 50.20 ± 0.89 | **+3.00 [+2.80, +3.20]** | 50.00 ± 0.71 | "
        "+0.20 [-0.16, +0.56] |"
    )
    assert text.count(row) == 2
    assert (
        "Over 2 pairs of selector and setting (5 seeds), these selectors with their own weights are on average +3.20 "
        "points from random selection: +0.20 [-0.16, +0.56] by selection, +3.00 [+2.80, +3.20] by the weights; the "
        "weights carry the gain." in text
    )


@pytest.mark.parametrize(
    ("own", "samples", "verdict"),
    [
        ([53.0, 54.1, 52.0], [53.0, 54.0, 52.1], "; selection carries the gain."),
        ([54.0, 55.1, 53.0], [53.0, 54.0, 52.1], "more than luck, and selection carries more of the gain."),
        ([51.0, 52.1, 50.0], [53.0, 54.0, 52.1], "; selection carries the gain, and the other part costs some of it."),
        ([49.0, 50.0, 48.0], [50.0, 51.1, 49.0], "; there is no gain to carry."),
        ([50.0, 51.5, 49.0], [50.1, 51.1, 48.5], "; neither is above zero by more than luck."),
        ([52.0], [51.0, 50.0], "(1 seed), these selectors with their own weights are on average +2.00 points"),
        ([52.0], [51.0], "+1.00 by selection, +1.00 by the weights; one seed says nothing about luck."),
    ],
)
def test_what_carries_a_gain_is_said_as_far_as_it_is_known(
    own: list[float], samples: list[float], verdict: str
) -> None:
    assert verdict in averaged_page(own, samples)


def test_averages_by_samples_are_shown_only_where_there_are_some() -> None:
    assert averaged_page(OURS, []) == ""
    alone = averaged_page([], [51.0, 52.0])
    assert "| Power-of-choice | – | 51.50 ± 0.71 | – | 50.00 ± 0.71 | +1.00 [+1.00, +1.00] |" in alone.replace("**", "")
    assert "these selectors with their own weights" not in alone


def test_averages_by_samples_are_exported_and_merged(tmp_path: Path) -> None:
    first, second = ([measured(c, seed, 50.0 + seed) for c in AVERAGED] for seed in (0, 1))
    export(tmp_path, CELLS, Results(None, dict(first)))
    export(tmp_path, CELLS, Results(None, dict(second)))
    assert [path.name for path in tmp_path.glob("*.csv")] == ["selectors-averaging.csv"]
    with (tmp_path / "selectors-averaging.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 28
    assert {row["swept"] for row in rows} == {"averaging=samples"}
    assert all(entry.values == {0: 50.0, 1: 51.0} for entry in compare(AVERAGED, read_exported(tmp_path), bool))


def test_averaging_by_samples_is_no_setting_of_selectors_that_do_so_anyway(tmp_path: Path) -> None:
    file = tmp_path / "cells.toml"
    block = (
        '[[cells]]\ntable = "own"\nmetric = "accuracy"\nmodel = "lenet5"\ndataset = "digits"\npartition = "dir:0.1"\n'
    )
    file.write_text(f'{block}method = ["random", "fedentopt", "pow-d"]\naveraging = "samples"\n')
    random, ours, weighted = cells_from_file(file)
    assert [c.config.averaging for c in (random, ours, weighted) if c.config] == ["selector", "selector", "samples"]
    assert random.config == ours.reference == weighted.reference
    file.write_text(f'{block}method = "random"\naveraging = "sizes"\n')
    with pytest.raises(InputError, match=r"averaging: 'sizes'.* accepted: selector, samples"):
        cells_from_file(file)


# --- tuned on held-out data
GRID = [cell for cell in CELLS if cell.table == "selectors-tuning"]


def grid_results(accuracies: dict[str, list[float]], partition: str = "dir:0.1") -> Results:
    """The grid on one partition: each method's values in the order of its cells, a little apart in every seed."""
    found = []
    for method, values in accuracies.items():
        own = [cell for cell in GRID if cell.method == method and cell.partition == partition]
        for cell, value in zip(own, values, strict=True):
            for i, seed in enumerate(cell.seeds):
                found.append(measured(cell, seed, 99.0, validation_accuracy=value + i / 10))
    return Results(None, dict(found))


def tuned(accuracies: dict[str, list[float]], **more: Any) -> dict[str, Cell]:
    plan = with_tuned(CELLS, grid_results(accuracies, **more), "all")
    assert plan[: len(CELLS)] == CELLS
    return {cell.method or "": cell for cell in plan[len(CELLS) :]}


def test_the_grid_chooses_by_held_out_data_and_ties_go_to_the_default() -> None:
    found = tuned({"fed-cbs": [50, 49, 51], "pow-d": [50, 50, 40], "fedentopt": [52, 52, 50], "flips": [1, 2, 3]})
    default = {cell.method: cell for cell in HERE if cell.participation == 10}
    assert all(cell.table == "selectors-tuned" and cell.extra for cell in found.values())
    assert all(cell.seeds == (0, 1, 2, 3, 4) for cell in found.values())
    fed_cbs = found["fed-cbs"].config
    assert fed_cbs is not None
    assert fed_cbs.validation == 0
    assert fed_cbs == dataclasses.replace(default["fed-cbs"].config, settings=fed_cbs.settings)  # type: ignore[type-var]
    assert (fed_cbs.of("selector")["beta"], found["fed-cbs"].swept) == (2.0, (("beta", 2.0),))
    assert found["pow-d"].config == default["pow-d"].config, "d = 20 is 2 M: the default, and its runs"
    assert (found["fedentopt"].buffer, default["fedentopt"].buffer) == (50, 50)
    assert found["flips"].config.of("selector")["clusters"] == 20  # type: ignore[union-attr]
    nothing_to_choose = {"random", "kl", "cycle", "clustered-size", "clustered-update", "clustered-label"}
    assert set(found) == {"fed-cbs", "pow-d", "fedentopt", "flips"} | nothing_to_choose
    assert all(found[method].config == default[method].config for method in nothing_to_choose)
    (seven,) = [
        c for c in tuned({"fedentopt": [52, 51, 50]}, partition="classes:2").values() if c.method == "fedentopt"
    ]
    assert (seven.partition, seven.buffer) == ("classes:2", 30)


def test_a_grid_that_is_not_finished_chooses_nothing() -> None:
    half = grid_results({"fed-cbs": [50, 49, 51]})
    missing = next(key for key in half._exported)
    del half._exported[missing]
    assert with_tuned(CELLS, half, "all") == CELLS
    with pytest.raises(InputError, match=r"selectors-tuned: no selector has a finished grid .*at most 110 runs"):
        with_tuned(CELLS, half, "selectors-tuned")
    assert with_tuned(HERE, half, "selectors-tuned") == HERE  # without a grid there is nothing to say


def test_the_page_shows_tuned_beside_default() -> None:
    grid = grid_results({"fed-cbs": [50, 49, 51], "fedentopt": [50, 52, 50]})
    plan = [cell for cell in with_tuned([*HERE, *GRID], grid, "all") if cell.table != TUNED or cell.method in SOME]
    better = [value + 2 for value in CBS]
    own = [cell for cell in plan if cell.table == TUNED and cell.method == "fed-cbs"]
    known = results(SOME)
    for cell in own:
        known._exported |= dict(measured(cell, seed, value) for seed, value in enumerate(better))
    text = page(compare(plan, known, lambda name: True))
    assert (
        "With every selector tuned on held-out data, FedEntOpt has the highest mean in 0 of 1 settings; higher" in text
    )
    section = text.split("## Every selector tuned on held-out data")[1].split("\n## ")[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| ")][2:]
    assert [row[0] for row in rows] == ["| Fed-CBS", "| FedEntOpt", "| Random", "| KL"]
    assert rows[0][1:4] == ["beta 2", "55.12 ± 0.68", "57.12 ± 0.68"]
    assert rows[0][4].startswith("+2.00 [")
    assert rows[0][5].startswith("**+3.04 [")
    assert rows[1][1:] == ["default", "54.08 ± 0.75", "54.08 ± 0.75", "–", "– |"]
    before = page(compare(plan, results(SOME), lambda name: True))
    assert "With every selector tuned" not in before, "what Fed-CBS chose has not been run"
    assert "| Fed-CBS | beta 2 | 55.12 ± 0.68 | not run yet | – | – |" in before


def test_the_figure_is_drawn_with_every_name_and_the_same_twice(tmp_path: Path) -> None:
    given = SOME | {"pow-d": KL, "hics-fl": CBS, "clustered-size": RANDOM}
    found = results(given)
    entries = compare(HERE, found, lambda name: True)
    written = write_figures(tmp_path / "a", entries, found)
    assert [path.name for path in written] == ["selectors.svg", "selectors.png"]
    texts = {node.text for node in ElementTree.parse(written[0]).iter() if node.tag.endswith("text")}
    assert {"FedEntOpt", "Fed-CBS", "KL", "Power-of-choice", "HiCS-FL", "all clients"} <= texts
    assert {"its label counts, once", "a loss, on request", "its own update, in the clear"} <= texts
    again = write_figures(tmp_path / "b", entries, found)
    assert written[0].read_bytes() == again[0].read_bytes()
    alone = compare(HERE, results({"fedentopt": OURS}), lambda name: True)
    assert write_figures(tmp_path / "c", alone, results({"fedentopt": OURS})) == []  # nothing to compare with


def test_the_figure_can_be_read_on_a_phone(tmp_path: Path) -> None:
    """With every selector, at both participations, 400 pixels wide: no text is smaller than 7 pixels."""
    both = [cell for cell in MAIN if cell.dataset == "cifar10" and cell.partition == "dir:0.1"]
    found = results(dict.fromkeys(SELECTORS.names, RANDOM), both)
    path, _ = write_figures(tmp_path, compare(both, found, lambda name: True), found)
    width = float(ElementTree.parse(path).getroot().attrib["viewBox"].split()[2])
    sizes = [float(size) for size in re.findall(r"font(?:-size)?: ([\d.]+)px", path.read_text(encoding="utf-8"))]
    assert len(sizes) > len(SELECTORS.names)
    assert min(sizes) * 400 / width >= 7


def test_the_ceiling_is_that_of_the_seeds_both_have() -> None:
    """Full participation has two seeds, random selection five: the others say nothing of the difference."""
    settings = [s for s in bench_settings(compared(SOME)) if s.by_method]
    assert ceiling(settings) == pytest.approx(60 - sum(RANDOM[:2]) / 2)
    assert sum(RANDOM[:2]) / 2 != pytest.approx(sum(RANDOM) / 5)
    assert ceiling([]) is None
    skewed = {**SOME, "fedentopt": [58.0, 58.5, 50.0, 50.0, 50.0]}  # +7.75 in the two seeds, +3.3 in all
    said = gap_closed([s for s in bench_settings(compared(skewed)) if s.by_method])
    assert "+9.5 points over random selection at 10 %, of which FedEntOpt brings +7.8 (82 %)" in said
    assert said.endswith("over the 2 of 5 seeds in which all clients were trained.")


def test_exported_results_bring_back_the_page(tmp_path: Path) -> None:
    found = results(SOME, asked=10_000)
    export(tmp_path, CELLS, found)
    assert not (tmp_path / "selectors_curves.csv").exists()
    back = read_exported(tmp_path)
    pages = [page(compare(CELLS, source, lambda name: True)) for source in (found, back)]
    assert pages[0] == pages[1]
    with (tmp_path / "selectors.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["asked"] for row in rows if row["participation"] == "10"} == {"10000"}
    assert "validation_accuracy" not in rows[0]  # nobody has it
    export(tmp_path, CELLS, Results())  # adds nothing, and loses nothing
    assert read_exported(tmp_path).get(HERE[0].config, 0) == back.get(HERE[0].config, 0)  # type: ignore[arg-type]


def test_a_file_from_before_has_fewer_columns_and_gets_them(tmp_path: Path) -> None:
    export(tmp_path, CELLS, results({"random": RANDOM}))
    path = tmp_path / "selectors.csv"
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    older = [name for name in rows[0] if name not in ("bytes_up", "bytes_down", "asked", "selection_seconds")]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, older, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    cell = next(cell for cell in HERE if cell.method == "random" and cell.participation == 10)
    assert cell.config is not None
    old = read_exported(tmp_path).get(cell.config, 0)
    assert old is not None
    assert (old.accuracy, old.bytes_up) == (50.0, None)
    export(tmp_path, CELLS, results({"kl": KL}))
    new = read_exported(tmp_path)
    assert new.get(cell.config, 0) == old
    kl = next(cell for cell in HERE if cell.method == "kl")
    assert kl.config is not None
    assert dataclasses.replace(new.get(kl.config, 0)).bytes_up == 500_000_000  # type: ignore[type-var]


def test_markdown_of_the_table_keeps_its_columns() -> None:
    (table,) = tables([entry for entry in compared(SOME) if entry.ours is not None])
    lines = [line for line in markdown(table).splitlines() if line.startswith("| ")]
    assert {line.count("|") for line in lines} == {len(table.columns) + 1}


def test_the_committed_page_is_what_the_committed_results_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = Path(__file__).resolve().parent.parent.parent
    made = tmp_path / "docs" / "SELECTORS.md"
    where = ("--results", root / "results" / "selectors", "--results-page", made)
    assert commander(monkeypatch, capsys)("reproduce", "selectors", *where).code == 0
    assert made.read_text() == (root / "docs" / "SELECTORS.md").read_text()


CELLS_FILE = """
[settings]
clients = 8
rounds = 2
epochs = 1
seeds = 2
speed_spread = 0.5

[[cells]]
table = "selectors"
metric = "accuracy"
model = "lenet5"
dataset = "digits"
partition = "mixed:0.01,0.5"
participation = 25
method = ["random", "fedentopt", "pow-d"]

[[cells]]
table = "selectors-tuning"
extra = true
metric = "validation_accuracy"
model = "lenet5"
dataset = "digits"
partition = "shards:2"
participation = 25
method = "rpow-d"
"selector.d" = [4, 8]
validation = 0.2
"""


def test_the_whole_command_on_small_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs, tables, export, page and figure; a second command makes the same page of the export alone."""
    command = commander(monkeypatch, capsys)
    cells = tmp_path / "cells.toml"
    cells.write_text(CELLS_FILE)
    where = [
        "--cells",
        str(cells),
        "--out",
        str(tmp_path / "out"),
        "--device",
        "cpu",
        "--trainer",
        "streams",
        "--no-page",
    ]
    for table in ("selectors", "selectors-tuning"):
        done = command("reproduce", table, *where, "--export", str(tmp_path / "export"))
        assert done.code == 0, done.err
    first = ["--results", str(tmp_path / "export"), "--results-page", str(tmp_path / "a" / "SELECTORS.md")]
    assert command("reproduce", "all", "--cells", str(cells), *first).code == 0
    text = (tmp_path / "a" / "SELECTORS.md").read_text()
    assert "## Where FedEntOpt is not best" in text
    assert "![Accuracy against what a selector asks of a client](results/selectors.svg)" in text
    assert "Power-of-choice (recent), d 8" in text
    assert (tmp_path / "a" / "results" / "selectors.png").is_file()
    with (tmp_path / "export" / "selectors.csv").open(newline="") as file:
        asked = {row["method"]: int(row["asked"]) for row in csv.DictReader(file)}
    assert asked == {"random": 0, "fedentopt": 0, "pow-d": 8}  # 2 M = 4 candidates in each of two rounds
    listed = command("reproduce", "selectors", *where, "--partition", "mixed:0.01,0.5", "--list")
    assert "3 cells: 3 done" in listed.out
