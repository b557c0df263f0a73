from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedentopt.errors import InputError
from fedentopt.partition import PartitionSpec, parse, partition
from fedentopt.partition.client_shares import DRAW

CIFAR_LIKE = np.repeat(np.arange(10), 5000)


def check(labels: np.ndarray, parts, clients: int, num_classes: int) -> None:
    """Disjoint, exhaustive, and counted right."""
    assert len(parts.indices) == clients
    assert np.array_equal(np.sort(np.concatenate(parts.indices)), np.arange(labels.size))
    assert parts.counts.shape == (clients, num_classes)
    assert parts.counts.dtype == np.int64
    for indices, row in zip(parts.indices, parts.counts, strict=True):
        assert np.array_equal(np.bincount(labels[indices], minlength=num_classes), row)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 30), st.integers(1, 6), st.integers(0, 5), st.data())
def test_classes(clients: int, classes: int, seed: int, data) -> None:
    j = data.draw(st.integers(1, classes))
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(classes), 40))
    if clients < classes and j < classes:
        try:
            parts = partition(labels, f"classes:{j}", clients, seed)
        except InputError as error:
            assert "without an owner" in str(error)  # noqa: PT017 - either outcome is right, depending on the draw
            return
    else:
        parts = partition(labels, f"classes:{j}", clients, seed)
    check(labels, parts, clients, classes)
    assert (np.count_nonzero(parts.counts, axis=1) == j).all()
    for k, row in enumerate(parts.counts):
        assert row[k % classes] > 0
    for column in parts.counts.T:
        owned = column[column > 0]
        assert owned.max() - owned.min() <= 1
        assert (np.diff(owned) <= 0).all()  # the larger parts go to the lower client numbers


@pytest.mark.parametrize("beta", [0.05, 0.1, 0.5, 100.0])
@pytest.mark.parametrize("min_samples", [0, 1, 10])
def test_dirichlet(beta: float, min_samples: int) -> None:
    labels = np.random.default_rng(0).permutation(CIFAR_LIKE[::5])
    parts = partition(labels, f"dir:{beta}", 20, 3, min_samples=min_samples)
    check(labels, parts, 20, 10)
    assert parts.counts.sum(axis=1).min() >= min_samples


def test_dirichlet_is_balanced_by_closing_clients_that_are_full() -> None:
    # A client gets nothing of further classes once it holds N/K samples, but for what rounding leaves over,
    # which falls to the last client: at most one sample a class.
    closed = 0
    for seed in range(10):
        counts = partition(CIFAR_LIKE, "dir:0.1", 100, seed).counts
        before = np.cumsum(counts, axis=1) - counts
        late = np.where(before >= 500, counts, 0)
        assert late[:-1].sum() == 0
        assert late[-1].max() <= 1
        closed += np.count_nonzero(before[:, -1] >= 500)
    assert closed > 100


def test_dirichlet_skew_grows_as_beta_falls() -> None:
    held = [np.count_nonzero(partition(CIFAR_LIKE, f"dir:{b}", 100, 0).counts, axis=1).mean() for b in (0.1, 1, 100)]
    assert held[0] < 6 < held[1] < held[2] == 10


def test_dirichlet_sizes_follow_the_draw() -> None:
    # With two clients, one class and no client full, the first part is floor(p n) with p ~ Beta(1, 1): its mean
    # over many seeds is n/2 and its spread n/sqrt(12), which a split into equal parts would not have.
    sizes = [partition(np.zeros(1000, dtype=int), "dir:1", 2, s, min_samples=0).counts[0, 0] for s in range(400)]
    assert np.mean(sizes) == pytest.approx(500, abs=60)
    assert np.std(sizes) == pytest.approx(1000 / np.sqrt(12), rel=0.12)


def test_iid() -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(4), 26))
    parts = partition(labels, "iid", 10, 0)
    check(labels, parts, 10, 4)
    assert sorted(parts.counts.sum(axis=1).tolist()) == [10] * 6 + [11] * 4
    big = partition(CIFAR_LIKE, "iid", 10, 0).counts
    assert np.abs(big - 500).max() < 110  # five standard deviations


@pytest.mark.parametrize("spec", ["dir:0.5", "classes:3", "iid"])
def test_seeded(spec: str) -> None:
    labels = CIFAR_LIKE[::20]
    first, again, other = (partition(labels, spec, 10, s) for s in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(first.indices, again.indices, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first.indices, other.indices, strict=True))


def test_samples_are_shuffled_within_a_class() -> None:
    parts = partition(CIFAR_LIKE, "classes:1", 20, 0)
    assert parts.indices[0].max() > 4000  # client 0 shares class 0 (samples 0 to 4999) with client 10
    assert parts.indices[0].min() < 1000


def test_more_classes_than_labels_show() -> None:
    parts = partition(np.array([0, 1] * 50), "dir:1", 4, 0, num_classes=5)
    assert parts.counts.shape == (4, 5)
    assert partition([0, 0, 1, 1], "iid", 2, 0, num_classes=3).counts.shape == (2, 3)


def test_a_class_without_samples_fails_no_draw() -> None:
    alone = partition([0, 1] * 20, "dir:0.1", 1, 0, num_classes=4)
    assert alone.counts.tolist() == [[20, 20, 0, 0]]
    assert alone.indices[0].tolist() == list(range(40))
    # Whoever is served here is full: the empty class in the middle finds nobody, nor does the one at the end.
    pair = partition([0, 2], "dir:1", 2, 0, num_classes=4, min_samples=1)
    assert sorted(pair.counts.tolist()) == [[0, 0, 1, 0], [1, 0, 0, 0]]


def test_a_class_without_samples_takes_part_in_draws_that_succeed_with_it() -> None:
    """Splits that were made keep their bits: drawn here as they always were, the empty class among the others."""
    labels, clients, beta = np.repeat([0, 2], 50), 5, 0.02
    for seed in range(20):
        rng = np.random.default_rng([seed, 0x5041])
        while True:
            sizes = np.zeros((4, clients), dtype=np.int64)
            for c, n in enumerate((50, 0, 50, 0)):
                p = rng.dirichlet(np.full(clients, beta))
                p[sizes.sum(0) >= 20] = 0.0
                if not p.sum() > 0:
                    break
                cuts = np.floor(np.cumsum(p / p.sum())[:-1] * n).astype(np.int64)
                sizes[c] = np.diff(cuts, prepend=0, append=n)
            else:
                if sizes.sum(0).min() >= 1:
                    break
        found = partition(labels, f"dir:{beta}", clients, seed, num_classes=4, min_samples=1)
        np.testing.assert_array_equal(found.counts.T, sizes)


def test_parse() -> None:
    assert parse("dir:0.1") == PartitionSpec("dir", 0.1)
    assert parse("classes:2") == PartitionSpec("classes", 2)
    assert parse(" iid ") == PartitionSpec("iid", 0)
    for text in ("dir:0.1", "classes:2", "iid", "classes:1234567", "dir:0.123456789", "dir:123456.5"):
        assert str(parse(text)) == text


@pytest.mark.parametrize(
    "spec", ["", "dir", "dir:", "dir:x", "dir:0", "dir:-1", "dir:nan", "dir:inf", "classes", "classes:0", "classes:-1",
             "classes:2.5", "classes:²", "classes:" + "9" * 400, "classes:" + "9" * 5000, "iid:1",
             "IID", "shard:2", "dir:0.1:2"]
)  # fmt: skip
def test_bad_specs_are_refused(spec: str) -> None:
    with pytest.raises(InputError, match=r"partition: .*accepted: "):
        parse(spec)


@pytest.mark.parametrize(
    ("labels", "spec", "clients", "options", "message"),
    [
        ([0, 1] * 10, "classes:3", 4, {}, "classes:3 asks for 3 of 2 classes"),
        (list(range(10)) * 5, "classes:1", 3, {}, r"leaves class 3 \(5 samples\) without an owner"),
        ([0] * 50 + [1] * 3, "classes:2", 10, {}, "gives class 1 10 owners, but it has 3 samples"),
        ([0, 2] * 50, "classes:1", 10, {}, "class 1 3 owners, but it has no samples; accepted: labels without"),
        ([0, 1, 2], "iid", 4, {}, "clients: 4 clients for 3 samples"),
        ([], "iid", 1, {}, "clients: 1 clients for 0 samples"),
        ([0, 1] * 10, "iid", 0, {}, "clients: 0"),
        ([0, 1] * 10, "iid", 2, {"seed": -1}, "seed: -1"),
        ([0, 1] * 10, "dir:1", 2, {"min_samples": -1}, "min_samples: -1"),
        ([0, 1] * 10, "dir:1", 4, {"min_samples": 6}, "min_samples: 6 samples for each of 4 clients, but there are 20"),
        ([0, 1] * 10, "iid", 2, {"num_classes": 1}, "num_classes: 1, but the labels go up to 1"),
        ([0, -1] * 10, "iid", 2, {}, "label -1 at position 1"),
        ([0, 10**12], "iid", 2, {}, "label 1000000000000 at position 1 with 2 samples; accepted: .*at most 65537"),
        ([[0], [1, 2]], "iid", 2, {}, "labels: rows of different lengths"),
        ([0, 1] * 10, "iid", 2, {"num_classes": "2"}, "num_classes: '2'"),
        ([0, 1] * 10, None, 2, {}, "partition: None is unknown"),
    ],
)
def test_impossible_splits_are_refused(labels, spec, clients, options, message) -> None:
    with pytest.raises(InputError, match=message):
        partition(labels, spec, clients, options.pop("seed", 0), **options)


def test_a_minimum_that_is_never_met_is_refused_with_its_settings() -> None:
    with pytest.raises(InputError, match=r"dir:0.01 among 30 clients never gave every client 10 samples in 1000 tries"):
        partition(np.repeat(np.arange(3), 100), "dir:0.01", 30, 0)
    with pytest.raises(InputError, match=r"dir:1e-300 among 5 clients never gave"):
        partition([0, 1] * 50, "dir:1e-300", 5, 0, min_samples=20)


def test_numbers_with_wide_gaps_are_split_as_numbers_without() -> None:
    # 27,001 classes: what a split costs must not grow with classes times classes, nor with classes times clients.
    labels = np.random.default_rng(0).integers(0, 10, 2000)
    found = partition(labels * 3000, "dir:1", 40, 0, min_samples=0)
    assert found.counts.shape == (40, 27_001)
    np.testing.assert_array_equal(np.sort(np.concatenate(found.indices)), np.arange(2000))
    np.testing.assert_array_equal(found.counts.sum(axis=0)[::3000], np.bincount(labels))
    many = partition(np.arange(2000), "classes:1", 2000, 0)
    assert [part.tolist() for part in many.indices] == [[k] for k in range(2000)]


MIXED = "mixed:0.001,0.002,0.005,0.01,0.5"


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 25),
    st.lists(st.integers(0, 60), min_size=1, max_size=7).filter(lambda sizes: sum(sizes) > 0),
    st.sampled_from(["shards:1", "shards:3", "quantity:0.5", "quantity:1e-5", "mixed:0.001,0.5", "mixed:1e-300",
                     "dir:0.1+quantity:0.5", "mixed:100,0.01+quantity:1e-4", "dir:1e300+quantity:1e300"]),
    st.integers(0, 5),
    st.integers(0, 2),
)  # fmt: skip
def test_every_sample_is_handed_out_once(clients: int, per_class, spec: str, seed: int, least: int) -> None:
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(per_class)), per_class))
    try:
        parts = partition(labels, spec, clients, seed, num_classes=len(per_class), min_samples=least)
    except InputError as error:
        assert "accepted:" in str(error)  # noqa: PT017 - few samples for so many clients
        assert labels.size < 3 * clients or (spec.startswith("mixed:") and clients < 2)
        return
    check(labels, parts, clients, len(per_class))
    sizes = parts.counts.sum(axis=1)
    if "quantity" in spec:
        assert sizes.min() >= least
    else:
        each = int(spec.partition(":")[2]) if spec.startswith("shards") else 1
        assert sizes.max() - sizes.min() <= each
    again = partition(labels, spec, clients, seed, num_classes=len(per_class), min_samples=least)
    assert all(np.array_equal(a, b) for a, b in zip(parts.indices, again.indices, strict=True))


@pytest.mark.parametrize("spec", ["shards:2", "quantity:0.5", MIXED, "dir:0.1+quantity:0.5"])
def test_another_seed_is_another_split(spec: str) -> None:
    first, second = (partition(CIFAR_LIKE, spec, 100, seed) for seed in (0, 1))
    assert not np.array_equal(first.counts, second.counts)
    assert not np.array_equal(first.indices[0], second.indices[0])


def test_shards_are_of_one_class_where_they_fit() -> None:
    labels = np.random.default_rng(0).permutation(CIFAR_LIKE)
    counts = partition(labels, "shards:2", 100, 0).counts
    assert (counts.sum(axis=1) == 500).all()
    assert set(counts[counts > 0]) == {250, 500}  # a shard is 250 samples; two of one client may be of one class
    assert set(np.count_nonzero(counts, axis=1)) == {1, 2}


def test_shards_of_eleven_samples_by_hand() -> None:
    labels = np.array([1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1])  # sorted: five 0s, six 1s; four shards of 3, 3, 3, 2
    counts = partition(labels, "shards:2", 2, 5).counts
    pieces = {(3, 0), (2, 1), (0, 3), (0, 2)}  # 000 | 00 1 | 111 | 11
    sums = {(a[0] + b[0], a[1] + b[1]) for a in pieces for b in pieces if a != b}
    assert {tuple(row) for row in counts} <= sums


def test_drawn_sizes_leave_labels_as_they_are() -> None:
    parts = partition(CIFAR_LIKE, "quantity:0.5", 100, 0, min_samples=10)
    sizes = parts.counts.sum(axis=1)
    assert sizes.min() >= 10
    assert sizes.max() > 5 * np.median(sizes)  # far from even
    large = parts.counts[sizes > 1000]
    assert len(large) > 5
    assert np.abs(large / large.sum(axis=1, keepdims=True) - 0.1).max() < 0.05


def test_drawn_sizes_follow_the_dirichlet() -> None:
    # Two clients and BETA = 1: the first share is uniform.
    sizes = [partition(np.zeros(1000, dtype=int), "quantity:1", 2, s, min_samples=0).counts[0, 0] for s in range(400)]
    assert np.mean(sizes) == pytest.approx(500, abs=60)
    assert np.std(sizes) == pytest.approx(1000 / np.sqrt(12), rel=0.12)


def test_mixed_has_groups_of_their_own_skew() -> None:
    counts = partition(CIFAR_LIKE, MIXED, 100, 0).counts
    assert (counts.sum(axis=1) == 500).all()
    share = counts.max(axis=1) / 500
    even, skewed = share[4::5], np.concatenate([share[g::5] for g in range(4)])
    assert np.median(skewed) > 0.99
    assert np.median(even) < 0.7


@pytest.mark.parametrize("beta", ["1e10", "1e308"])
def test_huge_concentrations_are_even(beta: str) -> None:
    """The sum of so many gamma draws is beyond floats, which must not pass for the other limit, all to one."""
    assert partition(CIFAR_LIKE, f"mixed:{beta}", 100, 0).counts.max() <= 51
    assert partition(CIFAR_LIKE, f"dir:{beta}", 20, 0).counts.max() <= 251
    sizes = partition(CIFAR_LIKE, f"quantity:{beta}", 100, 0).counts.sum(axis=1)
    assert sizes.max() - sizes.min() <= 2


@pytest.mark.parametrize(("beta", "last"), [(0.001, -1), (0.5, 1)])
def test_mixed_shares_are_a_dirichlet_until_classes_run_out(beta: float, last: int) -> None:
    """For p ~ Dir_10(b), the mean of sum(p_c^2) is (b + 1) / (10 b + 1). The last ten clients choose among few classes:
    more skewed where that takes some away, less where it takes the only one."""
    drawn = (beta + 1) / (10 * beta + 1)
    early, late = [], []
    for seed in range(12):
        counts = partition(CIFAR_LIKE[::5], f"mixed:{beta}", 100, seed).counts
        skew = np.square(counts / counts.sum(axis=1, keepdims=True)).sum(axis=1)
        order = np.random.default_rng([seed, DRAW, 1]).permutation(100)
        early += skew[order[:40]].tolist()
        late += skew[order[-10:]].tolist()
    assert np.mean(early) == pytest.approx(drawn, abs=0.015)
    assert (np.mean(late) - drawn) * last > 0.02


def test_mixed_fills_from_what_is_left() -> None:
    # One class of 90 and one of 10: nine clients of ten samples must be of the large class, whatever they draw.
    labels = np.repeat([0, 1], [90, 10])
    counts = partition(labels, "mixed:0.0001", 10, 0).counts
    assert counts.sum(axis=0).tolist() == [90, 10]
    assert (counts.sum(axis=1) == 10).all()


def test_skewed_in_labels_and_in_sizes() -> None:
    counts = partition(CIFAR_LIKE, "dir:0.1+quantity:0.5", 100, 0, min_samples=10).counts
    sizes = counts.sum(axis=1)
    assert sizes.min() >= 10
    assert sizes.max() > 5 * np.median(sizes)
    assert np.median(counts.max(axis=1) / sizes) > 0.6


def test_natural_takes_the_owners_as_they_are() -> None:
    labels = np.array([0, 1, 0, 1, 2])
    parts = partition(labels, "natural", 2, 0, owners=[1, 0, 1, 1, 0])
    assert [part.tolist() for part in parts.indices] == [[1, 4], [0, 2, 3]]
    assert parts.counts.tolist() == [[0, 1, 1], [2, 1, 0]]


@pytest.mark.parametrize(
    ("clients", "owners", "message"),
    [
        (2, None, "natural needs data"),
        (2, [0, 1], "accepted: a client number for each of 3 samples"),
        (2, [0.0, 1.0, 1.0], "accepted: a client number for each of 3 samples"),
        (3, [0, 1, 1], "clients: 3 asked for, but the data names 2 clients; accepted: 2"),
        (2, [[0], [1, 1], 1], "accepted: a client number for each of 3 samples"),
        (2, [0, 2, 2], "owners: 2 clients with numbers from 0 to 2; accepted: 0 to 1"),
        (100, None, "natural needs data"),
        (100, [0, 1, 1], "clients: 100 asked for, but the data names 2 clients; accepted: 2"),
        (2, [-1, 0, 1], "clients: 2 asked for, but the data names 3"),
    ],
)
def test_owners_that_are_refused(clients: int, owners, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        partition([0, 1, 1], "natural", clients, 0, owners=owners)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("shards:0", "'0' shards per client; accepted: a whole number from 1"),
        ("shards:1.5", "'1.5' shards per client"),
        ("shards", "is unknown; accepted: dir:BETA, classes:J, shards:S"),
        ("quantity:-1", "the concentration '-1'; accepted: a number above 0, such as quantity:0.5"),
        ("mixed:", "the concentration ''"),
        ("mixed:0.1,", "the concentration ''"),
        ("mixed:0.1,nan", "the concentration 'nan'"),
        ("dir:0.1+quantity:x", "the concentration 'x'; accepted: a number above 0, such as dir:0.1+quantity:0.5"),
        ("classes:2+quantity:0.5", "sizes cannot be drawn for 'classes:2'; accepted: dir or mixed"),
        ("quantity:1+quantity:0.5", "sizes cannot be drawn for 'quantity:1'"),
        ("natural:3", "is unknown"),
        ("iid+quantity:0.5", "sizes cannot be drawn for 'iid'"),
    ],
)
def test_specs_that_are_refused(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        parse(spec)


@pytest.mark.parametrize(
    ("spec", "clients", "least", "message"),
    [
        ("shards:4", 3, 0, "12 shards, but there are 10 samples; accepted: at most 3 shards per client"),
        ("mixed:0.1,0.2,0.3", 2, 0, "3 concentrations for 2 clients"),
        ("quantity:0.5", 4, 3, "min_samples: 3 samples for each of 4 clients, but there are 10; accepted: at most 2"),
        ("dir:0.1+quantity:0.5", 4, 3, "min_samples: 3 samples for each of 4 clients"),
    ],
)
def test_splits_that_are_refused(spec: str, clients: int, least: int, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        partition(np.arange(10) % 2, spec, clients, 0, min_samples=least)


@pytest.mark.parametrize(
    "spec", ["shards:2", "quantity:0.5", MIXED, "dir:0.1+quantity:0.5", "natural", "mixed:1+quantity:2"]
)
def test_new_specs_are_written_as_they_are_read(spec: str) -> None:
    assert str(parse(spec)) == spec
    assert parse(str(parse(spec))) == parse(spec)


BETAS = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
MORE = st.none() | BETAS
SPECS = st.one_of(
    st.builds(PartitionSpec, st.sampled_from(["classes", "shards"]), st.integers(1, 10**15 - 1).map(float)),
    st.builds(PartitionSpec, st.just("dir"), BETAS, quantity=MORE),
    st.builds(PartitionSpec, st.just("quantity"), BETAS),
    st.builds(PartitionSpec, st.just("mixed"), betas=st.lists(BETAS, min_size=1).map(tuple), quantity=MORE),
    st.builds(PartitionSpec, st.sampled_from(["natural", "iid"])),
)


@given(SPECS)
@example(PartitionSpec("shards", 1e6))
def test_every_spec_can_be_read_as_it_is_written(spec: PartitionSpec) -> None:
    assert parse(str(spec)) == spec


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (PartitionSpec("dir", -1.0), "the concentration '-1'"),
        (PartitionSpec("mixed"), "the concentration ''"),
        (PartitionSpec("mixed", betas=(0.1, 0.0)), "the concentration '0'"),
        (PartitionSpec("shards", 2.5), "'2.5' shards per client"),
        (PartitionSpec("shards"), "'0' shards per client"),
        (PartitionSpec("sharks", 2), "'sharks:2' is unknown"),
        (PartitionSpec("dir", 0.1, quantity=0.0), "the concentration '0'"),
    ],
)
def test_specs_made_by_hand_are_checked_as_well(spec: PartitionSpec, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        partition(np.arange(100) % 4, spec, 5, 0)
