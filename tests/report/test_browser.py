"""The page in headless Chromium, opened from disk with the network off."""

from __future__ import annotations

import csv
import itertools
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from browsing import DESKTOP, EVIL, PHONE, OpenedPage, launch
from configs import run_config
from fedentopt.report import write_report
from fedentopt.results.reading import find_runs
from result_folders import write_comparison, write_run
from watched_runs import CLIENTS, METHODS, write_watched

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    yield from launch()


class Opened(OpenedPage):
    """The page of results."""

    def column(self, name: str) -> list[str]:
        """First line of every cell of a column of the summary table, top to bottom."""
        return self.cells("#summary .of-group:not([hidden]) table", name)

    def drawn(self, chart: str) -> Any:
        """What Plotly draws there."""
        return self.page.evaluate("id => document.getElementById(id).data", chart)

    def lines(self, chart: str) -> list[str]:
        return [trace["meta"] for trace in self.drawn(chart) if trace.get("meta")]

    def figure(self, side: str, name: str) -> str:
        return self.page.locator(f"#cohort-{side}-text [data-figure={name}]").inner_text()

    def round_to(self, index: int) -> None:
        self.page.locator("#round").fill(str(index))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_comparison(tmp_path_factory.mktemp("browser") / "demo", seeds=2, rounds=15)
    write_report(directory)
    return directory


@pytest.fixture(scope="module")
def opened(browser: Browser, folder: Path) -> Iterator[Opened]:
    page = Opened(browser, folder / "report.html")
    yield page
    page.context.close()


def rounds_of(folder: Path, method: str, seed: int) -> list[dict[str, str]]:
    (file,) = folder.glob(f"{method}_*_s{seed}_*/rounds.csv")
    with file.open(newline="") as stream:
        return list(csv.DictReader(stream))


def label_table(folder: Path, method: str, seed: int) -> list[list[float]]:
    (file,) = folder.glob(f"{method}_*_s{seed}_*/label_counts.csv")
    with file.open(newline="") as stream:
        return [[float(value) for value in row[1:]] for row in list(csv.reader(stream))[1:]]


def test_opens_from_disk_without_network_or_complaint(opened: Opened) -> None:
    assert opened.complaints == []
    assert [url for url in opened.requests if not url.startswith(("file:", "data:"))] == []
    charts = [chart.get_attribute("id") for chart in opened.page.locator(".chart").all()]
    assert len(charts) == 12
    for chart in charts:
        assert opened.page.locator(f"#{chart} .main-svg").first.is_visible(), chart


def test_tables_sort_by_mouse_and_keyboard(opened: Opened) -> None:
    head = opened.page.locator("#summary-0 thead button", has_text="Accuracy")
    head.click()
    falling = [float(text.split()[0]) for text in opened.column("Accuracy")]
    assert falling == sorted(falling, reverse=True)
    assert opened.page.locator("#summary-0 th[aria-sort=descending]").inner_text().startswith("Accuracy")
    head.focus()
    opened.page.keyboard.press("Enter")
    rising = [float(text.split()[0]) for text in opened.column("Accuracy")]
    assert rising == sorted(rising)
    opened.page.locator("#summary-0 thead button", has_text="Method").click()
    assert opened.column("Method") == ["fedavg", "fedentopt", "fedentopt-dp"]


def test_accuracy_curve_is_the_mean_of_the_seeds(opened: Opened, folder: Path) -> None:
    (trace,) = [trace for trace in opened.drawn("accuracy-chart") if trace.get("meta") == "fedentopt"]
    runs = [rounds_of(folder, "fedentopt", seed) for seed in (0, 1)]
    for at, mean in zip(trace["x"], trace["y"], strict=True):
        assert mean == pytest.approx(statistics.mean(float(run[at - 1]["accuracy"]) for run in runs), abs=0.006)
    assert trace["x"] == list(range(1, 16))


def test_methods_switch(opened: Opened) -> None:
    box = opened.page.get_by_role("checkbox", name="fedentopt-dp")
    charts = ("accuracy-chart", "entropy-chart", "participation-chart", "bytes-chart")
    for chart in charts:
        assert "fedentopt-dp" in opened.lines(chart)
    box.focus()
    opened.page.keyboard.press("Space")
    for chart in charts:
        assert opened.lines(chart) == ["fedavg", "fedentopt"]
    assert len(opened.drawn("classes-chart")[0]["z"]) == 2
    box.check()
    assert "fedentopt-dp" in opened.lines("accuracy-chart")


def test_round_slider_shows_the_cohort_of_rounds_csv(opened: Opened, folder: Path) -> None:
    slider = opened.page.locator("#round")
    opened.round_to(0)
    seen = set()
    for index in range(15):
        assert opened.page.locator("#round-number").inner_text() == str(index + 1)
        for side, method in (("left", "fedavg"), ("right", "fedentopt")):
            row = rounds_of(folder, method, 0)[index]
            labels = label_table(folder, method, 0)
            clients = json.loads(row["clients"])
            assert opened.figure(side, "entropy") == f"{float(row['entropy']):.4f}"
            assert opened.figure(side, "covered") == row["classes_covered"]
            assert opened.figure(side, "accuracy") == f"{float(row['accuracy']):.2f}"
            assert opened.figure(side, "clients") == ", ".join(str(client) for client in clients)
            bars = [trace for trace in opened.drawn(f"cohort-{side}") if trace["type"] == "bar"]
            assert [trace["y"] for trace in bars] == [labels[client] for client in clients]
            missing = 10 - int(row["classes_covered"])
            crosses = opened.page.evaluate(
                "id => document.getElementById(id).layout.annotations.length", f"cohort-{side}"
            )
            assert crosses == missing
            seen.add((side, missing > 0))
        slider.focus()
        opened.page.keyboard.press("ArrowRight")
    assert ("left", True) in seen, "the test data should have a round in which random selection misses a class"


def test_opens_at_a_round_in_which_only_the_left_cohort_lacks_a_class(browser: Browser, tmp_path: Path) -> None:
    folder = write_comparison(tmp_path, seeds=1, seed=1, rounds=8)
    covered = [[int(row["classes_covered"]) for row in rounds_of(folder, name, 1)] for name in ("fedavg", "fedentopt")]
    telling = [i + 1 for i, (left, right) in enumerate(zip(*covered, strict=True)) if left < 10 == right]
    assert telling
    assert telling[0] > 1, "the test data should not begin with such a round"
    fresh = Opened(browser, write_report(folder))
    assert fresh.page.locator("#round-number").inner_text() == str(telling[0])
    assert "missing: " in fresh.page.locator("#cohort-left-text").inner_text()
    assert "none missing" in fresh.page.locator("#cohort-right-text").inner_text()
    fresh.context.close()


def test_other_seed_and_other_method_can_be_chosen(opened: Opened, folder: Path) -> None:
    opened.page.locator("#seed").select_option("1")
    opened.page.locator("#left").select_option(label="fedentopt-dp")
    opened.round_to(4)
    assert opened.figure("left", "entropy") == f"{float(rounds_of(folder, 'fedentopt-dp', 1)[4]['entropy']):.4f}"
    assert opened.figure("right", "entropy") == f"{float(rounds_of(folder, 'fedentopt', 1)[4]['entropy']):.4f}"
    opened.page.locator("#left").select_option(label="fedavg")
    opened.page.locator("#seed").select_option("0")


def test_gap_button_finds_a_round_without_some_class(opened: Opened, folder: Path) -> None:
    opened.round_to(0)
    opened.page.locator("#gap").click()
    expected = next(
        i for i, row in enumerate(rounds_of(folder, "fedavg", 0)) if i > 0 and int(row["classes_covered"]) < 10
    )
    assert opened.page.locator("#round-number").inner_text() == str(expected + 1)


def test_play_at_the_last_round_starts_again(browser: Browser, folder: Path) -> None:
    opened = Opened(browser, folder / "report.html")
    opened.round_to(14)
    assert opened.page.locator("#round-number").inner_text() == "15"
    opened.page.locator("#play").click()
    opened.page.wait_for_function("Number(document.getElementById('round-number').textContent) < 15")
    assert opened.page.locator("#play").inner_text() == "Stop"
    opened.page.locator("#play").click()
    assert opened.page.locator("#play").inner_text() == "Play"
    opened.context.close()


def test_heat_map_and_counts_match_the_picks(opened: Opened, folder: Path) -> None:
    rows = rounds_of(folder, "fedavg", 0)
    z = opened.drawn("picks-left")[0]["z"]
    chosen = {(client, at) for at, row in enumerate(rows) for client in json.loads(row["clients"])}
    assert {(client, at) for client, line in enumerate(z) for at, value in enumerate(line) if value > 0} == chosen
    opened.page.locator("#participation-order").select_option("client")
    (trace,) = [trace for trace in opened.drawn("participation-chart") if trace["meta"] == "fedavg"]
    assert trace["y"] == [sum(client == who for who, _ in chosen) for client in range(40)]


def test_bytes_to_a_target(opened: Opened, folder: Path) -> None:
    opened.page.locator("#target").fill("30")
    cells = opened.page.locator("#target-table tbody tr", has_text="fedavg").locator("td").all_inner_texts()
    sent, rounds = [], []
    for seed in (0, 1):
        rows = rounds_of(folder, "fedavg", seed)
        first = next(i for i, row in enumerate(rows) if float(row["accuracy"]) >= 30)
        rounds.append(first + 1)
        sent.append(sum(int(row["bytes_up"]) + int(row["bytes_down"]) for row in rows[: first + 1]))
    assert float(cells[0]) == pytest.approx(statistics.mean(sent) / 1e6, rel=0.005)
    assert float(cells[1]) == statistics.mean(rounds)
    assert cells[2] == "2 of 2"


def test_theme_follows_the_system_and_the_button(browser: Browser, folder: Path) -> None:
    opened = Opened(browser, folder / "report.html", color_scheme="dark")

    def background() -> str:
        return opened.page.evaluate("getComputedStyle(document.body).backgroundColor")

    dark = background()
    opened.page.get_by_role("button", name="Light").click()
    assert background() == "rgb(255, 255, 255)" != dark
    opened.page.get_by_role("button", name="Dark").click()
    assert background() == dark
    assert opened.complaints == []
    opened.context.close()


def test_fits_a_phone(browser: Browser, folder: Path) -> None:
    opened = Opened(browser, folder / "report.html", viewport=PHONE, is_mobile=True, has_touch=True)
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    left = opened.page.locator("#cohort-left").bounding_box()
    right = opened.page.locator("#cohort-right").bounding_box()
    assert left is not None
    assert right is not None
    assert right["y"] > left["y"] + left["height"] - 1
    before = opened.figure("left", "clients")
    opened.page.locator("#next").tap()
    assert opened.figure("left", "clients") != before
    assert opened.complaints == []
    opened.context.close()


def test_every_control_is_reached_by_keyboard(browser: Browser, folder: Path) -> None:
    opened = Opened(browser, folder / "report.html")
    wanted = {
        "theme",
        "left",
        "right",
        "seed",
        "round",
        "previous",
        "next",
        "gap",
        "play",
        "participation-order",
        "target",
    }
    reached = set()
    for _ in range(160):
        opened.page.keyboard.press("Tab")
        reached.add(opened.page.evaluate("document.activeElement.id"))
    assert wanted - reached == set()
    opened.context.close()


def test_copy_button_takes_the_command(browser: Browser, folder: Path) -> None:
    opened = Opened(browser, folder / "report.html", permissions=["clipboard-read", "clipboard-write"])
    opened.page.locator("[data-copy]").first.click()
    opened.page.get_by_role("button", name="Copied").wait_for()
    assert opened.page.evaluate("navigator.clipboard.readText()") == "fedentopt compare --out DIR"
    opened.context.close()


def test_hostile_names_stay_names(browser: Browser, tmp_path: Path) -> None:
    directory = tmp_path / "hostile"
    names = [EVIL, '"><img src=x onerror=alert(2)>', "%{x}", "&lt;b&gt;", *(f"c{i}" for i in range(8))]
    classes = (EVIL, "</script><script>alert(3)</script>", "$x$ <b>bold</b>", '<a href="javascript:alert(4)">x</a>')
    for changes in ({}, {"selector": "fedentopt", "buffer": "4"}):
        config = run_config(clients=12, cohort="4", rounds=6, dataset=f"/data/{EVIL}", **changes)
        folder = write_run(
            directory, config, classes=classes, clients=names, command=f"fedentopt run --dataset '{EVIL}'"
        )
        info = json.loads((folder / "run.json").read_text())
        info["method"] += EVIL
        (folder / "run.json").write_text(json.dumps(info))
    opened = Opened(browser, write_report(directory))
    for index in range(6):
        opened.round_to(index)
    opened.page.locator("#participation-order").select_option("client")
    box = opened.page.locator("#cohort-left .bars path").first.bounding_box()
    assert box is not None
    opened.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    opened.page.locator("#cohort-left .hovertext").first.wait_for()
    assert opened.complaints == []
    assert opened.page.locator("svg a, svg b").count() == 0
    ticks = opened.page.locator("#clients-chart .ytick text").all_text_contents()
    assert any(tick.startswith("<script>alert") for tick in ticks)
    assert any(tick.startswith("$x$ <b>") for tick in ticks)
    assert opened.column("Method")[0] == f"fedavg{EVIL}"
    assert EVIL in opened.page.locator(".command code").first.inner_text()
    opened.context.close()


def test_many_methods_and_a_run_without_label_counts(browser: Browser, tmp_path: Path) -> None:
    classes = tuple(f"class {i}" for i in range(30))
    for number in range(13):
        method = {"selector": "fedentopt", "buffer": str(number)} if number else {}
        config = run_config(clients=20, cohort="8", rounds=4, **method)
        folder = write_run(tmp_path, config, classes=classes)
        if number == 0:
            rows = rounds_of_setting(tmp_path, "dir:0.1")
            (folder / "label_counts.csv").unlink()
    opened = Opened(browser, write_report(tmp_path), viewport=PHONE)
    # What rounds.csv knows is said, what only the counts know is not invented.
    assert opened.figure("left", "clients") == ", ".join(str(client) for client in json.loads(rows[0]["clients"]))
    assert opened.figure("left", "covered") == rows[0]["classes_covered"]
    assert "label counts are not in the page" in opened.page.locator("#cohort-left").inner_text()
    assert opened.page.locator("#cohort-right .main-svg").first.is_visible()
    assert opened.page.locator("#clients-chart .main-svg").first.is_visible()
    plot = opened.page.locator("#participation-chart .nsewdrag").bounding_box()
    legend = opened.page.locator("#participation-chart .legend .bg").bounding_box()
    assert plot is not None
    assert legend is not None
    assert plot["height"] > 150
    assert legend["y"] > plot["y"] + plot["height"] + 40  # below the axis and its title
    # Names of classes stand apart, at a phone's width too.
    for chart, ticks in (("classes-chart", "xtick"), ("forget-left", "ytick"), ("clients-chart", "ytick")):
        boxes = [tick.bounding_box() for tick in opened.page.locator(f"#{chart} .{ticks} text").all()]
        edges = sorted(
            (box["x"], box["x"] + box["width"]) if ticks == "xtick" else (box["y"], box["y"] + box["height"])
            for box in boxes
            if box is not None
        )
        assert len(edges) >= 4
        assert all(end <= start + 3 for (_, end), (start, _) in itertools.pairwise(edges)), chart
    # One line until it is opened; then the names stand in full, below each other.
    assert not opened.page.locator("#method-list").is_visible()
    assert opened.page.locator("#methods-toggle").inner_text().split() == ["Methods", "shown:", "13", "of", "13"]
    opened.page.locator("#methods-toggle").click()
    boxes = [label.bounding_box() for label in opened.page.locator("#method-list label").all()]
    assert all(box is not None and box["x"] + box["width"] <= PHONE["width"] for box in boxes)
    opened.page.locator("#method-filter").fill("buffer=1")
    assert opened.page.locator("#method-list label:visible span").all_inner_texts() == [
        f"fedentopt (buffer={number})" for number in (1, 10, 11, 12)
    ]
    opened.page.locator("#no-methods").click()
    assert len(opened.lines("accuracy-chart")) == 9
    opened.page.locator("#two-methods").click()
    assert opened.lines("accuracy-chart") == ["fedavg", opened.page.locator("#right option:checked").inner_text()]
    opened.page.locator("#method-filter").fill("")
    opened.page.locator("#all-methods").click()
    assert len(opened.lines("accuracy-chart")) == 13
    drawn = [trace for trace in opened.drawn("accuracy-chart") if trace.get("meta")]
    assert len({(t["line"]["color"], t["line"]["dash"], t["marker"]["symbol"]) for t in drawn}) == 13
    assert len({t["line"]["color"] for t in drawn}) == 10
    colours = [trace["line"]["color"] for trace in drawn]
    assert [colour for colour in colours if contrast_with_white(colour) < 2] == []
    assert opened.complaints == []
    opened.context.close()


def test_a_picture_has_a_legend_a_title_and_the_marks_of_accuracy_png(browser: Browser, tmp_path: Path) -> None:
    algorithms = ("fedavg", "fedprox", "fednova", "scaffold", "fedrs", "fedlc", "fedavgm", "fedadam", "feddyn")
    for algorithm in algorithms:
        write_run(tmp_path, run_config(clients=8, cohort="2", rounds=5, algorithm=algorithm), classes=tuple("abc"))
    opened = Opened(browser, write_report(tmp_path))
    tools = opened.page.locator(".tools:has(+ #accuracy-chart)")
    assert tools.evaluate("place => getComputedStyle(place).opacity") == "0"
    opened.page.locator("#accuracy-chart").hover()
    assert tools.evaluate("place => getComputedStyle(place).opacity") == "1"
    for chart in ("accuracy-chart", "entropy-chart", "bytes-chart", "participation-chart"):
        svg = opened.page.evaluate(
            "async id => decodeURIComponent((await Plotly.toImage(...pictureOf(id))).split(',').slice(1).join(','))",
            chart,
        )
        named = [name for name in algorithms if f">{name}" in svg]
        assert named == [name for name in algorithms if name in opened.lines(chart)]
        assert len(named) > 1, chart
        assert opened.page.locator(f"section:has(#{chart}) h2").inner_text() in svg
        assert "8 clients, 2 per round" in svg
    with opened.page.expect_download() as saving:
        tools.locator("button").click()
    assert saving.value.suggested_filename == "fedentopt-accuracy-chart.svg"

    from matplotlib.colors import to_hex

    from fedentopt.report.curve_plot import accuracy_figure
    from fedentopt.report.styles import MATPLOTLIB_MARKS
    from fedentopt.results.aggregate import by_method

    lines = accuracy_figure(by_method(find_runs(tmp_path)), "all").axes[0].lines
    beside = {line.get_label(): (to_hex(line.get_color()).upper(), line.get_marker()) for line in lines}
    drawn = {
        t["meta"]: (t["line"]["color"], t["marker"]["symbol"]) for t in opened.drawn("accuracy-chart") if "meta" in t
    }
    assert {name: (colour, MATPLOTLIB_MARKS[mark]) for name, (colour, mark) in drawn.items()} == beside
    assert len(set(beside.values())) == 9
    assert opened.complaints == []
    opened.context.close()


def test_a_large_sweep_leaves_room_for_its_charts_and_is_sorted_by_numbers(browser: Browser, tmp_path: Path) -> None:
    settings = [(mu, lr, decay) for mu in (0.0001, 0.001, 0.01, 0.1) for lr in (0.01, 0.1) for decay in (0.001, 0.0005)]
    for mu, lr, decay in settings:
        config = run_config(clients=10, rounds=3, algorithm="fedprox", mu=mu, lr=lr, weight_decay=decay)
        write_run(tmp_path, config, classes=tuple("abc"))
    names = [f"fedprox (lr={lr}, mu={mu}, weight_decay={decay})" for mu, lr, decay in settings]
    opened = Opened(browser, write_report(tmp_path), viewport={"width": 900, "height": 700})
    page = opened.page
    for section in ("accuracy", "entropy", "bytes"):
        page.evaluate("document.documentElement.style.scrollBehavior = 'auto'")
        page.locator(f"nav a[href='#{section}']").click()
        title = page.locator(f"#{section} h2").bounding_box()
        methods = page.locator("#methods").bounding_box()
        assert title is not None
        assert methods is not None
        assert methods["y"] + methods["height"] <= title["y"] < 400, section
    for order in (1, -1):
        page.locator("#summary .of-group:not([hidden]) thead button").first.click()
        assert opened.column("Method") == sorted(names, key=by_settings)[::order]
    ticks = page.locator("#classes-chart .ytick text").all_text_contents()
    assert len(set(ticks)) == len(names)
    assert opened.complaints == []
    opened.context.close()


def by_settings(name: str) -> list[float]:
    return [float(part.partition("=")[2]) for part in name.removesuffix(")").split(", ")]


def test_methods_without_a_seed_in_common_say_which_one_they_show(browser: Browser, tmp_path: Path) -> None:
    for selector, seeds in (("random", (0, 1)), ("fedentopt", (1, 2))):
        for seed in seeds:
            write_run(tmp_path, run_config(clients=20, rounds=3, selector=selector, seed=seed), classes=tuple("abcde"))
    opened = Opened(browser, write_report(tmp_path))

    def titles() -> list[str]:
        charts = [f"{kind}-{side}" for kind in ("cohort", "picks", "forget") for side in ("left", "right")]
        read = "ids => ids.map((id) => document.getElementById(id).layout.title.text)"
        found: list[str] = opened.page.evaluate(read, charts)
        return found

    def marked() -> list[str]:
        return [trace["name"] for trace in opened.drawn("clients-chart") if trace["type"] == "scatter"]

    assert opened.page.locator("#seed").input_value() == "1"  # the one that both have
    assert titles() == ["fedavg", "fedentopt"] * 3
    assert marked() == ["fedavg", "fedentopt"]
    opened.page.locator("#seed").select_option("0")
    assert titles() == ["fedavg", "fedentopt, seed 1"] * 3
    assert marked() == ["fedavg"]  # clients of another partition hold other labels
    assert [trace["name"].split(":")[0] for trace in opened.drawn("participation-chart")] == [
        "fedavg",
        "fedentopt, seed 1",
    ]
    opened.page.locator("#seed").select_option("2")
    assert titles() == ["fedavg, seed 0", "fedentopt"] * 3
    assert opened.complaints == []
    opened.context.close()


def contrast_with_white(colour: str) -> float:
    """The contrast ratio of WCAG 2; 1 cannot be told from white, 21 is black."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 1.05 / (0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05)


def test_settings_are_chosen_and_dropouts_marked(browser: Browser, tmp_path: Path) -> None:
    for partition in ("dir:0.1", "classes:2"):
        config = run_config(clients=20, cohort="5", rounds=6, partition=partition, dropout=0.5)
        write_run(tmp_path, config, classes=tuple("abcde"))
    opened = Opened(browser, write_report(tmp_path))
    chooser = opened.page.locator("#group")
    assert chooser.locator("option").count() == 2
    for number, partition in ((1, "dir:0.1"), (0, "classes:2")):
        chooser.select_option(str(number))
        opened.page.wait_for_function(
            "text => document.getElementById('setting').textContent.includes(text)", arg=partition
        )
        rows = rounds_of_setting(tmp_path, partition)
        assert opened.figure("left", "entropy") == f"{float(rows[0]['entropy']):.4f}"
        z = opened.drawn("picks-left")[0]["z"]
        absent = {
            (k, i)
            for i, row in enumerate(rows)
            for k in set(json.loads(row["clients"])) - set(json.loads(row["trained"]))
        }
        assert {(k, i) for k, line in enumerate(z) for i, value in enumerate(line) if value == 0.5} == absent
        assert absent
    assert not opened.page.locator("#cohort-right").is_visible()  # one method: nothing to put beside it
    opened.page.get_by_role("button", name="dir:0.1").click()
    opened.page.wait_for_function("document.getElementById('setting').textContent.includes('dir:0.1')")
    assert opened.complaints == []
    opened.context.close()


def rounds_of_setting(folder: Path, partition: str) -> list[dict[str, str]]:
    (file,) = folder.glob(f"*_{partition.replace(':', '')}_*/rounds.csv")
    with file.open(newline="") as stream:
        return list(csv.DictReader(stream))


# --- what servers believed; one page with four settings serves all of these tests
LIED_TO, HONEST, OLDER, TRUSTING = 8, 7, 6, 5  # their rounds


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Liars beside audits and inference; an audit of honest clients; one of a version without clients.csv; none."""
    directory = write_watched(tmp_path_factory.mktemp("watched"), *METHODS)
    others = ({"audit": "warn", "rounds": HONEST}, {"audit": "warn", "rounds": OLDER}, {"rounds": TRUSTING})
    write_watched(directory, *others, seeds=1)
    (older,) = [run for run in find_runs(directory) if run.config["rounds"] == OLDER]
    assert older.path is not None
    (older.path / "clients.csv").unlink()
    write_report(directory)
    return directory


@pytest.fixture(scope="module")
def watching(browser: Browser, watched: Path) -> Iterator[Opened]:
    page = Opened(browser, watched / "report.html", color_scheme="dark")
    yield page
    page.context.close()


def show(opened: Opened, rounds: int) -> None:
    chooser = opened.page.locator("#group")
    name = chooser.locator("option", has_text=f"{rounds} rounds").inner_text()
    chooser.select_option(label=name)
    opened.page.wait_for_function("text => document.getElementById('setting').textContent === text", arg=name)


def boxes_of(opened: Opened, selector: str) -> list[tuple[float, float, float, float]]:
    """Left, top, right and bottom of what is shown there."""
    found = [place.bounding_box() for place in opened.page.locator(selector).all()]
    return [(box["x"], box["y"], box["x"] + box["width"], box["y"] + box["height"]) for box in found if box is not None]


def overlap(one: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    return one[0] < other[2] - 2 and other[0] < one[2] - 2 and one[1] < other[3] - 2 and other[1] < one[3] - 2


@pytest.mark.parametrize("viewport", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_panels_and_their_texts_stand_apart(watching: Opened, viewport: Any) -> None:
    show(watching, LIED_TO)
    watching.page.set_viewport_size(viewport)
    watching.page.locator("#theme").click()  # draws everything anew, and tells dark from light
    for chart in ("belief-chart", "liars-chart", "auc-chart", "error-chart", "suspects-chart"):
        assert watching.page.locator(f"#{chart} .main-svg").first.is_visible(), chart
    assert watching.page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    for chart, number in (("belief-chart", 4), ("suspects-chart", 2)):
        panels = boxes_of(watching, f"#{chart} .nsewdrag")
        texts = boxes_of(watching, f"#{chart} .annotation-text") + boxes_of(watching, f"#{chart} .legend .bg")
        marks = boxes_of(watching, f"#{chart} [class*=tick] text") + boxes_of(watching, f"#{chart} [class*=xtitle]")
        assert len(panels) == number
        assert len(texts) == number + 1
        assert len(marks) > 4 * number
        pairs = [*itertools.combinations(panels + texts, 2), *itertools.product(texts, marks)]
        assert [pair for pair in pairs if overlap(*pair)] == [], chart
        assert max(box[2] for box in panels + texts) <= viewport["width"]
    assert watching.complaints == []


def test_suspects_are_marked_by_seed_and_listed(watching: Opened, watched: Path) -> None:
    page = watching.page
    show(watching, LIED_TO)
    kinds = {
        "honest": lambda client: not client.liar,
        "liar": lambda client: client.liar,
        "suspected": lambda client: client.suspected,
    }
    for seed in (1, 0):
        page.locator("#suspects-seed").select_option(str(seed))
        assert page.locator("#seed").input_value() == str(seed)
        runs = [run for run in find_runs(watched) if run.seed == seed and run.config["rounds"] == LIED_TO]
        by_audit = {run.config.get("audit"): run for run in runs}
        drawn = [trace for trace in watching.drawn("suspects-chart") if trace["x"] != [None]]
        for panel, audit in (("x", "quarantine"), ("x2", "replace")):
            for name, wanted in kinds.items():
                seen = [client for client in by_audit[audit].clients or () if client.observed and wanted(client)]
                (trace,) = [trace for trace in drawn if trace["name"] == name and trace["xaxis"] == panel]
                assert [round(x) for x in trace["x"]] == [client.chosen for client in seen]
                assert trace["y"] == pytest.approx([client.distance for client in seen], abs=6e-5)
        symbols = {trace["name"]: trace["marker"]["symbol"] for trace in drawn if trace["xaxis"] == "x"}
        assert symbols == {"honest": "circle", "liar": "diamond", "suspected": "square-open"}  # in quarantine
    assert "liars suspected" in str(page.locator("#suspects-chart").get_attribute("aria-label"))
    page.locator("#suspects-list summary").click()
    rows = page.locator("#suspects-table tbody tr")
    rows.first.wait_for()  # a browser tells of the opening a moment later
    assert rows.count() == 4 * CLIENTS
    for _ in range(2):  # no verdict, no, yes; and the other way round
        page.locator("#suspects-table button", has_text="Suspected").click()
    assert rows.first.locator("td").all_inner_texts()[1:3] == ["liar", "yes"]
    box = page.get_by_role("checkbox", name="audit=replace")
    box.uncheck()
    assert rows.count() == 3 * CLIENTS
    assert len(boxes_of(watching, "#belief-chart .nsewdrag")) == 3
    box.check()
    page.locator("#auc-of").select_option("first_auc")
    first = [run.rounds.first_auc[-1] for run in find_runs(watched) if run.config.get("audit") == "replace"]
    (trace,) = [trace for trace in watching.drawn("auc-chart") if trace.get("meta", "").endswith("(audit=replace)")]
    assert trace["y"][-1] == pytest.approx(statistics.mean(first), abs=6e-5)
    assert watching.complaints == []


def test_each_setting_shows_what_it_has(watching: Opened, opened: Opened) -> None:
    page = watching.page
    for setting, parts in ((TRUSTING, ()), (OLDER, ("belief",)), (HONEST, ("belief", "suspects"))):
        show(watching, setting)
        for part in ("belief", "suspects"):
            assert page.locator(f"#{part}").is_visible() == (part in parts), setting
            assert page.locator(f"nav a[href='#{part}']").is_visible() == (part in parts), setting
    # Nobody lies, nobody is accused.
    assert [trace["name"] for trace in watching.drawn("suspects-chart") if trace["x"] != [None]] == ["honest"]
    assert f"0 of {CLIENTS} honest suspected" in str(page.locator("#suspects-chart").get_attribute("aria-label"))
    for part, shown in (("liars-chart", False), ("auc-chart", False), ("liars-note", False), ("error-chart", True)):
        assert page.locator(f"#{part}").is_visible() == shown, part
    show(watching, LIED_TO)
    page.locator("#no-methods").click()
    for chart in ("belief-chart", "suspects-chart"):
        assert "No method that is switched on" in page.locator(f"#{chart}").inner_text()
    page.locator("#all-methods").click()
    assert watching.complaints == []
    # A page without any of this has no such parts at all.
    assert opened.page.locator("#belief, #suspects, nav a[href='#belief']").count() == 0
