"""What selectors keep per client: numbers by client number and vectors' distances, against making them anew."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedentopt.selection import RandomSelector
from fedentopt.selection.per_client import ClientFigures, ClientVectors, angles, as_pairs, euclidean, unit


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["set", "add", "read", "forget", "join", "recount"]), st.integers(0, 9))))
def test_figures_by_number_are_those_made_anew(moves: list[tuple[str, int]]) -> None:
    selector = RandomSelector(1)
    selector.register({0: [1, 2]})
    kept, plain = ClientFigures(np.nan), {}
    for step, (move, client) in enumerate(moves):
        if move == "set":  # also of somebody who is not registered
            kept[client] = plain[client] = float(step)
        elif move == "add":
            kept.add([client], 2)
            plain[client] = plain.get(client, 0) + 2
        elif move == "join" and client not in selector.clients:
            selector.register({client: [3, 4]})
        elif move == "forget" and client in selector.clients and len(selector.clients) > 1:
            selector.remove([client])
            kept.forget([client])
            plain.pop(client, None)
        elif move == "recount":
            selector.update({selector.clients[0]: [step, 1]})
        if move == "read":
            np.testing.assert_array_equal(kept.by_number(selector._table), selector.by_number(plain, np.nan))
    np.testing.assert_array_equal(kept.by_number(selector._table), selector.by_number(plain, np.nan))
    assert as_pairs(kept) == as_pairs(plain)
    assert [client in kept for client in range(10)] == [client in plain for client in range(10)]


def test_units_of_any_length() -> None:
    np.testing.assert_allclose(unit(np.array([[3, 4]], np.float32)), [0.6, 0.8], rtol=1e-6)
    assert unit(np.zeros(3, np.float32)).tolist() == [0, 0, 0]  # type: ignore[union-attr]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for scale in (1e-44, 1e-30, 1e-12, 1e12, 1e30, 3e38):  # whose square single precision does not hold
            found = unit(np.array([scale, -scale], np.float32))
            np.testing.assert_allclose(found, [0.5**0.5, -(0.5**0.5)], rtol=1e-6)
        np.testing.assert_allclose(unit(np.array([1e100, 0.0])), [1, 0])
        for scale in (1e-320, 1e-300, 1e-160, 1e160, 1e300):  # nor double precision
            np.testing.assert_allclose(unit(np.array([3 * scale, -4 * scale])), [0.6, -0.8], rtol=1e-3)
        assert unit(np.array([1.0, np.nan], np.float32)) is None
        assert unit(np.array([1.0, np.inf], np.float32)) is None


@pytest.mark.parametrize("distance", [angles, euclidean])
def test_distances_are_those_of_all_vectors_made_anew(distance: object) -> None:
    """Some change, some join, one is 0, some leave: what is kept equals what all vectors give at once."""
    rng = np.random.default_rng(0)
    vectors = ClientVectors(distance, units=distance is angles)  # type: ignore[arg-type]
    latest: dict[int, np.ndarray] = {}
    for step in range(12):
        some = rng.choice(15, int(rng.integers(1, 6)), replace=False).tolist()
        told = {client: rng.normal(size=40).astype(np.float32) for client in some}
        if step == 4:
            told[some[0]] = np.zeros(40, np.float32)
        if distance is angles:
            told = {client: unit(vector) for client, vector in told.items()}  # type: ignore[misc]
        vectors.put(told, 15)  # type: ignore[arg-type]
        latest |= told
        if step == 7:
            vectors.forget(some)
            latest = {client: vector for client, vector in latest.items() if client not in some}
    rows = np.array([latest[client] for client in vectors.ids]).astype(np.float64)
    squares = (rows**2).sum(axis=1)
    expected = distance(rows, rows, squares, squares)  # type: ignore[operator]
    np.fill_diagonal(expected, 0)
    everybody = np.arange(len(rows))
    found = vectors.between(everybody, everybody)
    np.testing.assert_allclose(found, expected, atol=2e-3 if distance is angles else 1e-5)
    np.testing.assert_array_equal(found, found.T)


def test_distances_beyond_single_precision_keep_their_relations() -> None:
    """One client diverges, the others' distances are measured anew beside its; it calms down or leaves, and back."""
    rng = np.random.default_rng(0)
    rows = {client: rng.uniform(-3, 3, 40).astype(np.float32) for client in range(5)}
    huge = {4: rows[4] * np.float32(2.0**126), 3: rows[3] * np.float32(2.0**126)}
    everybody = np.arange(5)

    def kept(*told: dict[int, np.ndarray]) -> ClientVectors:
        vectors = ClientVectors(euclidean)
        for some in told:
            vectors.put(some, 5)  # type: ignore[arg-type]
        return vectors

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain, loud = kept(rows), kept(rows, huge)
        found = loud.between(everybody, everybody)
        # The same as if all were small, up to the common factor that all distances have.
        small = kept({client: (row / 2.0**126).astype(np.float32) for client, row in (rows | huge).items()})
        ratio = found / np.where(np.eye(5) > 0, 1.0, small.between(everybody, everybody))
        np.testing.assert_allclose(ratio[3, [0, 1, 2, 4]], ratio[3, 4], rtol=1e-5)
        assert found[3, 4] > 0
        assert np.isfinite(found).all()
        again = ClientVectors(euclidean)
        again.remember(loud.ids)
        again.load(loud.arrays())
        for vectors in (loud, again):
            vectors.put({3: rows[3]}, 5)
            np.testing.assert_array_equal(vectors.between(everybody[:4], everybody[:4]) > 0, ~np.eye(4, dtype=bool))
        np.testing.assert_array_equal(loud.between(everybody, everybody), again.between(everybody, everybody))
        loud.put({4: rows[4]}, 5)
        np.testing.assert_allclose(loud.between(everybody, everybody), plain.between(everybody, everybody), rtol=1e-6)
        again.forget([4])
        np.testing.assert_allclose(
            again.between(everybody[:4], everybody[:4]), plain.between(everybody[:4], everybody[:4]), rtol=1e-6
        )


def test_rows_by_number_follow_who_comes_and_goes() -> None:
    selector = RandomSelector(1)
    selector.register({"a": [1, 1], "b": [1, 1], "c": [1, 1]})
    vectors = ClientVectors()
    one = np.ones(2, np.float32)
    assert vectors.by_number(selector._table).tolist() == [-1, -1, -1]
    vectors.put({"c": one}, 3)
    vectors.put({"a": one}, 3)
    assert vectors.by_number(selector._table).tolist() == [1, -1, 0]
    vectors.forget(["c"])
    assert vectors.by_number(selector._table).tolist() == [0, -1, -1]
    selector.remove(["b"])
    assert vectors.by_number(selector._table).tolist() == [0, -1]
    vectors.remember(["c", "a"])
    assert vectors.by_number(selector._table).tolist() == [-1, -1]
    vectors.load({"vectors": np.ones((2, 2), np.float32)})
    assert vectors.by_number(selector._table).tolist() == [1, 0]
