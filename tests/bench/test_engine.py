"""The engine's benchmark: operations counted right, every case measured by what would train it."""

from __future__ import annotations

import pytest

from fedentopt.bench.engine import Case, as_json, bench_engine, sample_flop


def test_operations_of_known_networks():
    # LeNet-5: 784*6*75 + 100*16*150 + 400*120 + 120*84 + 84*10 products forward, two operations each, three passes.
    assert sample_flop("lenet5", 32) == 6 * (784 * 450 + 100 * 2400 + 48000 + 10080 + 840)
    # EfficientNet-B0 at 224 pixels: 0.39 billion products (torchvision's figure), depthwise ones counted as such.
    assert sample_flop("efficientnet-b0", 224) / 6e9 == pytest.approx(0.386, abs=0.01)


def test_a_case_is_measured():
    (speed,) = bench_engine("cpu", cases=(Case("lenet5", 2, 70, 1),), repeats=1, workers=1)
    assert speed.samples_per_second > 0
    assert speed.floor_share > 0
    assert speed.first_round_s > 0
    assert "loop trainer" in speed.runs
    assert not speed.uneven
    report = as_json([speed], "cpu")
    assert report["speeds"][0]["samples_per_second"] == speed.samples_per_second
    assert len(report["sources"]) == 64
    assert {"fedentopt", "commit", "torch", "cpu", "device"} <= report.keys()


def test_uneven_clients_have_last_batches_of_their_own():
    case = Case("lenet5", 10, 143, 1, uneven=True)
    assert sum(case.sizes()) == 1430
    assert len({size % 64 for size in case.sizes()}) == 10
    assert (min(case.sizes()), max(case.sizes())) == (1, 285)
    (speed,) = bench_engine("cpu", cases=(Case("lenet5", 3, 20, 1, uneven=True),), repeats=1, workers=1)
    assert speed.uneven
    assert speed.clients == 3
