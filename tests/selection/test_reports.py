"""The forms in which counts may be handed over, and what is refused."""

from __future__ import annotations

import tracemalloc
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
from scipy import sparse

from fedentopt import EntropySelector
from fedentopt.errors import InputError
from fedentopt.selection import SELECTORS, RandomSelector, reports
from fedentopt.selection.rows import Rows

TABLE = np.array([[4, 0, 0], [0, 3, 1], [2, 2, 0], [0, 0, 5]])


def compressed(table: np.ndarray) -> SimpleNamespace:
    matrix = sparse.csr_array(table)
    return SimpleNamespace(indptr=matrix.indptr, indices=matrix.indices, data=matrix.data, shape=matrix.shape)


FORMS = {
    "array": TABLE,
    "lists": TABLE.tolist(),
    "floats": TABLE.astype(np.float32),
    "unsigned": TABLE.astype(np.uint8),
    "mapping": dict(enumerate(TABLE)),
    "mapping of lists": dict(enumerate(TABLE.tolist())),
    "held classes": {k: {int(c): int(row[c]) for c in np.flatnonzero(row)} for k, row in enumerate(TABLE)},
    "held classes and vectors": {0: [4, 0, 0], 1: {1: 3, 2: 1}, 2: np.array([2, 2, 0]), 3: {2: 5.0}},
    "compressed rows": compressed(TABLE),
    "scipy csr": sparse.csr_array(TABLE),
    "scipy coo": sparse.coo_array(TABLE),
    "scipy csc matrix": sparse.csc_matrix(TABLE),
    "mapping of scipy rows": {k: sparse.csr_array(TABLE[k : k + 1]) for k in range(4)},
    "mapping of scipy vectors": {k: sparse.coo_array(row) for k, row in enumerate(TABLE)},
    "scipy with stored zeros": sparse.csr_array(
        (np.array([4, 0, 3, 1, 2, 2, 5]), np.array([0, 2, 1, 2, 0, 1, 2]), np.array([0, 2, 4, 6, 7])), shape=(4, 3)
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_mean_the_same(form: str) -> None:
    selector = EntropySelector(4)
    selector.register(FORMS[form])
    assert selector.clients == (0, 1, 2, 3)
    assert selector.num_classes == 3
    cohort = selector.select()
    assert cohort.label_counts.tolist() == [6, 5, 6]
    one = EntropySelector(1)
    one.register(FORMS[form])
    for client in range(4):
        assert one.select([client]).label_counts.tolist() == TABLE[client].tolist()


def test_ids_beside_an_array() -> None:
    selector = EntropySelector(2)
    selector.register(TABLE[:2], ids=["x", 7])
    selector.register(sparse.csr_array(TABLE[2:]), ids=np.array([8, 9]))
    assert selector.clients == ("x", 7, 8, 9)
    assert [type(client) for client in selector.clients] == [str, int, int, int]
    selector.update(TABLE[:1], ids=[9])
    assert selector.select([9, 8]).label_counts.tolist() == [6, 2, 0]


def test_the_index_of_a_data_frame_names_its_clients() -> None:
    selector = EntropySelector(2)
    selector.register(pd.DataFrame(TABLE[:2], index=["x", "y"]))
    selector.register(pd.DataFrame(TABLE)[2:], ids=["z", 7])
    selector.register(pd.DataFrame(TABLE[2:3], index=[5]))
    assert selector.clients == ("x", "y", "z", 7, 5)
    selector.update(pd.DataFrame(TABLE[1:2], index=["x"]))
    assert selector.counts[0].tolist() == TABLE[1].tolist()
    plain = EntropySelector(2)
    plain.register(pd.DataFrame(TABLE))
    assert plain.clients == tuple(range(len(TABLE)))
    with pytest.raises(InputError, match=r"0\.5 is a float; accepted: text or a whole number as the index of"):
        plain.update(pd.DataFrame(TABLE[:1], index=[0.5]))
    with pytest.raises(InputError, match=r"client 'a': given twice"):
        EntropySelector(1).register(pd.DataFrame(TABLE[:2], index=["a", "a"]))
    with pytest.raises(InputError, match=r"a data frame of the classes 2, 0, 1; accepted: .*0, 1, 2, \.\.\."):
        EntropySelector(1).register(pd.DataFrame(TABLE[:2], columns=[2, 0, 1]))


def test_text_and_number_are_different_clients() -> None:
    selector = EntropySelector(2)
    selector.register({"1": [1, 0], 1: [0, 1]})
    assert set(selector.select().clients) == {"1", 1}


def test_many_small_changes_are_the_same_as_one_table() -> None:
    rng = np.random.default_rng(0)
    final = rng.integers(1, 9, (30, 4))
    piecewise = EntropySelector(5, buffer_size=10, seed=3)
    for k in range(30):
        piecewise.register({f"c{k}": rng.integers(1, 9, 4), f"gone{k}": [1, 1, 1, 1]})
    for k in range(30):
        piecewise.update({f"c{k}": [9, 9, 9, 9]})
        piecewise.update({f"c{k}": final[k]})
        piecewise.remove([f"gone{k}"])
    at_once = EntropySelector(5, buffer_size=10, seed=3)
    at_once.register(final, ids=[f"c{k}" for k in range(30)])
    assert piecewise.clients == at_once.clients
    for _ in range(10):
        assert piecewise.select().clients == at_once.select().clients


def test_number_of_classes_of_sparse_rows() -> None:
    told = EntropySelector(1)
    told.register({"a": {0: 1}}, num_classes=4)
    assert told.select().label_counts.tolist() == [1, 0, 0, 0]
    with pytest.raises(InputError, match=r"client 'b': class 4; accepted: 0 to 3"):
        told.register({"b": {4: 1}})
    with pytest.raises(InputError, match="num_classes: 5; accepted: 4"):
        told.register({"b": {0: 1}}, num_classes=5)
    guessed = EntropySelector(1)
    guessed.register({"a": {2: 1}})
    assert guessed.num_classes == 3
    aimed = EntropySelector(1, target=[1, 1, 2, 0])
    aimed.register({"a": {2: 1}})
    assert aimed.num_classes == 4


@pytest.mark.parametrize("name", ["cycle", "flips", "clustered-label"])
def test_large_class_numbers_cost_nothing_and_change_no_pick(name: str) -> None:
    """These compare clients in dense tables. Forty clients with a class of their own each, and two that some share."""
    cohorts = []
    for first in (2, 999_000):
        selector = SELECTORS.get(name)(5, seed=3)
        tracemalloc.start()
        selector.register({k: {k % 2: 3, first + 7 * k if first > 2 else first + k: 4 + k % 3} for k in range(40)})
        cohorts.append([selector.select().clients for _ in range(4)])
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 100 << 20, "a table of all classes takes 320 MiB"
    assert cohorts[0] == cohorts[1]


def test_a_server_may_have_as_many_classes_as_it_says() -> None:
    selector = RandomSelector(1)
    selector.register({"a": {3_000_000: 2}}, num_classes=3_000_001)
    selector.register(sparse.csr_array(([1], [5], [0, 1]), shape=(1, 3_000_001)), ids=["b"])
    assert selector.select(["a"]).label_counts[3_000_000] == 2
    assert selector.select(["b"]).label_counts[5] == 1
    unsaid = RandomSelector(1)
    unsaid.register({"a": {999_999: 2}})
    assert unsaid.num_classes == 1_000_000


BAD = [
    ({"a": [1, 2], "b": [1, 2, 3]}, {}, "client 'b': 3 label counts"),
    ({"a": [1, 2], "b": "12"}, {}, "client 'b': label counts of shape"),
    ({"a": [1, 2], "b": [1, -2]}, {}, "client 'b': the count of class 1 is -2"),
    ({"a": [1, 2], "b": [1, float("nan")]}, {}, "client 'b': the count of class 1 is nan"),
    ({"a": [1, 2], "b": [float("inf"), 1]}, {"noisy": True}, "client 'b': the count of class 0 is inf"),
    ({"a": [1, 2], "b": [0, 0]}, {}, "client 'b': all label counts are 0"),
    ({"b": [True, False]}, {}, "client 'b': 2 label counts of type bool"),
    ({"a": [1, 2], "b": None}, {}, "client 'b'"),
    ({"a": [1, 2], "b": {}}, {}, "client 'b': all label counts are 0"),
    ({"a": {0: 1}, "b": {1: -1}}, {}, "client 'b': the count of class 1 is -1"),
    ({"a": {0: 1}, "b": {"x": 1}}, {}, "client 'b': class 'x'"),
    ({"a": {0: 1}, "b": {-1: 1}}, {}, "client 'b': class -1"),
    ({"a": {0: 1}, "b": {True: 1}}, {}, "client 'b': class True"),
    ({"a": {0: 1}, "b": {1: "many"}}, {}, "client 'b': label counts of type"),
    ({"a": {0: 1}, "b": {1: float("nan")}}, {"noisy": True}, "client 'b': the count of class 1 is nan"),
    ({"a": {0: 1}, "b": {2**31: 1}}, {}, "client 'b': class 2147483648"),
    ({"a": {0: 1}, "b": {10**9: 1}}, {}, "client 'b': class 1000000000; accepted: 0 to 1048575, unless num_classes"),
    ({k: {10**9 + k: 1} for k in range(50)}, {}, "client 0: class 1000000000; accepted: 0 to 1048575"),
    (
        sparse.csr_array(([1], [5], [0, 1]), shape=(1, 10**9)),
        {},
        "counts: 1000000000 classes; accepted: at most 1048576",
    ),
    (
        {"a": sparse.csr_array(([1], [5], [0, 1]), shape=(1, 10**9))},
        {},
        "counts: 1000000000 classes; accepted: at most",
    ),
    ({"a": {0: 1}}, {"num_classes": 2**31 + 1}, r"num_classes: 2147483649 is too large; accepted: at most 2\*\*31"),
    ({1.5: [1, 2]}, {}, "client id: 1.5 is a float"),
    ({True: [1, 2]}, {}, "client id: True is a bool"),
    ({b"a": [1, 2]}, {}, "client id: b'a' is a bytes"),
    ({"a": [1, 2]}, {"ids": ["a"]}, "ids: given beside a mapping"),
    ([[1, 2], [3]], {}, "counts: rows of different lengths"),
    ([1, 2, 3], {}, r"counts: an array of shape \(3,\)"),
    (np.ones((2, 3, 4)), {}, r"counts: an array of shape \(2, 3, 4\)"),
    (np.ones((2, 0)), {}, r"counts: an array of shape \(2, 0\)"),
    ([["a", "b"]], {}, "counts: values of type <U1"),
    (np.array([[1, 2], [-1, 2]]), {}, "client 1: the count of class 0 is -1"),
    (np.array([[1, 2], [np.nan, 2]]), {}, "client 1: the count of class 0 is nan"),
    (np.array([[1, 2], [0, 0]]), {"ids": ["x", "y"]}, "client 'y': all label counts are 0"),
    (np.ones((2, 2)), {"ids": ["x"]}, "ids: 1 ids for 2 rows"),
    (np.ones((2, 2)), {"ids": ["x", "x"]}, "client 'x': given twice"),
    (np.ones((2, 2)), {"ids": "xy"}, "client ids: 'xy' is one value"),
    (np.full((1, 2), 1e16), {}, r"client 0: the count of class 0 is 1e\+16; accepted: at most 2\*\*53"),
    (sparse.csr_array(np.array([[1, 0], [0, -1]])), {}, "client 1: the count of class 1 is -1"),
    (sparse.csr_array(np.array([[1, 0], [0, 0]])), {}, "client 1: all label counts are 0"),
    (SimpleNamespace(indptr=[0, 1], indices=[5], data=[1], shape=(1, 2)), {}, "client 0: class 5; accepted: 0 to 1"),
    (SimpleNamespace(indptr=[0, 2], indices=[1, 1], data=[1, 2], shape=(1, 2)), {}, "client 0: a class is given twice"),
    (SimpleNamespace(indptr=[0, 3], indices=[1, 0, 1], data=[1, 1, 2], shape=(1, 2)), {}, "a class is given twice"),
    (SimpleNamespace(indptr=[0, 9], indices=[1], data=[1], shape=(1, 2)), {}, "entries of the sparse matrix"),
    (SimpleNamespace(indptr=[0, 1], indices=[1], data=[1], shape=(2, 2)), {}, "row pointers of the sparse matrix"),
    (SimpleNamespace(indptr=[1, 2], indices=[0, 1], data=[1, 1], shape=(1, 2)), {}, "row pointers of the sparse"),
    (SimpleNamespace(indptr=[0, 2, 1], indices=[0, 1], data=[1, 1], shape=(2, 2)), {}, "row pointers of the sparse"),
    ({"x": sparse.coo_array([1, 2]), "y": sparse.coo_array([1])}, {}, r"client 'y': sparse .*accepted: \(1, 2\)"),
    ({"x": sparse.csr_array([[1, 2], [3, 4]])}, {}, r"client 'x': sparse label counts of shape \(2, 2\)"),
    ({"x": sparse.csr_array([[1, 2]]), "y": sparse.csr_array([[1, -2]])}, {}, "client 'y': the count of class 1 is -2"),
    (np.ones((1, 2)), {"num_classes": 0}, "num_classes: 0"),
    (np.ones((1, 1)), {"num_classes": True}, "num_classes: True"),
    (np.ones((1, 2)), {"num_classes": "2"}, "num_classes: '2'"),
    (np.ones((1, 2)), {"num_classes": 2.0}, "num_classes: 2.0"),
    (np.ones((1, 2)), {"num_classes": 3}, "counts: 2 classes; accepted: 3"),
]


@pytest.mark.parametrize(("counts", "options", "message"), BAD)
def test_bad_counts_are_refused_and_nothing_is_registered(counts, options: dict, message: str) -> None:
    selector = EntropySelector(1)
    with pytest.raises(InputError, match=message):
        selector.register(counts, **options)
    assert selector.clients == ()
    selector.register({"fine": [1, 1, 1, 1, 1]})  # not even the number of classes is remembered


def test_known_and_unknown_clients() -> None:
    selector = EntropySelector(1)
    selector.register({"a": [1, 2], "b": [2, 1]})
    with pytest.raises(InputError, match="client 'a': already registered"):
        selector.register({"c": [1, 1], "a": [1, 2]})
    with pytest.raises(InputError, match="client 'c': not registered"):
        selector.update({"a": [9, 9], "c": [1, 1]})
    with pytest.raises(InputError, match="client 'c': not registered"):
        selector.remove(["a", "c"])
    with pytest.raises(InputError, match="counts: 3 classes; accepted: 2"):
        selector.register(np.ones((1, 3)), ids=["c"])
    with pytest.raises(InputError, match="client 'a': 3 label counts"):
        selector.update({"a": [1, 2, 3]})
    with pytest.raises(InputError, match="client ids: 'a' is one value"):
        selector.remove("a")
    with pytest.raises(InputError, match="client ids: 3 is one value"):
        selector.select(available=3)
    assert selector.clients == ("a", "b")
    assert selector.select(["a"]).label_counts.tolist() == [1, 2]
    numbered = EntropySelector(1)
    numbered.register(np.ones((2, 2)))
    with pytest.raises(InputError, match=r"client 0: already registered; .*an array without ids numbers its clients"):
        numbered.register(np.ones((2, 2)))


def test_nothing_to_register_changes_nothing() -> None:
    selector = EntropySelector(1)
    selector.register({})
    selector.register({"a": [1, 2]})
    selector.register({})
    selector.register(np.zeros((0, 2)))
    selector.update({})
    selector.remove([])
    assert selector.select().clients == ("a",)


def _unreadable() -> list[object]:
    import torch

    return [torch.ones(4, 3, requires_grad=True), torch.ones(4, 3).bfloat16(), torch.ones(4, 3).to_sparse()]


@pytest.mark.parametrize("number", range(3))
def test_tensors_that_numpy_cannot_read_are_refused(number: int) -> None:
    tensor = _unreadable()[number]
    with pytest.raises(InputError, match="counts: Tensor cannot be read"):
        EntropySelector(2).register(tensor)


def test_refusals_inside_a_mapping_name_the_client() -> None:
    import torch

    with pytest.raises(InputError, match="client 'b'"):
        EntropySelector(2).register({"a": torch.ones(3), "b": torch.ones(3, requires_grad=True)})
    with pytest.raises(InputError, match=r"client 'a': label counts .*; accepted: a number per class"):
        EntropySelector(2).register({"a": {0: [1, 2], 1: 3}})


class Unreadable:
    """A vector of a library of its own, which does not let NumPy look inside."""

    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def __array__(self, dtype=None, copy=None):
        raise self.error("not for NumPy")


@pytest.mark.parametrize("error", [ValueError, TypeError, RuntimeError])
def test_vectors_that_numpy_cannot_read_are_refused_by_the_clients_name(error: type[Exception]) -> None:
    with pytest.raises(InputError, match="client 'a'"):
        EntropySelector(2).register({"a": Unreadable(error), "b": [1, 2]})


def test_series_are_read_by_place_and_refused_in_another_order() -> None:
    """`value_counts` puts the commonest class first and leaves out those that are not there."""
    one, two = pd.Series([0, 0, 2]), pd.Series([2, 2, 1])
    text = {"a": pd.Series(["x", "x", "y"]).value_counts(), "b": pd.Series(["y", "y", "x"]).value_counts()}
    for counts, client, classes in (
        ({"a": one.value_counts(), "b": two.value_counts()}, "'a'", "0, 2"),
        ({"b": {0: 1}, "a": two.value_counts()}, "'a'", "2, 1"),
        ([one.value_counts(), two.value_counts()], "0", "0, 2"),
        (text, "'b'", "y, x"),
        ({"a": pd.Series([1.0, 1.0, 0.0]).value_counts()}, "'a'", "1.0, 0.0"),  # numbers beside a missing label
    ):
        selector = EntropySelector(1)
        with pytest.raises(InputError, match=f"client {client}: label counts: a series of the classes {classes}; acc"):
            selector.register(counts)
        assert selector.clients == ()
    selector = EntropySelector(1)
    selector.register({"a": one.value_counts().to_dict(), "b": two.value_counts().to_dict()})
    frame = pd.DataFrame([[3, 0, 1]], index=["c"], columns=["x", "y", "z"])
    selector.register(dict(frame.iterrows()))
    assert selector.counts.tolist() == [[2, 0, 1], [0, 1, 2], [3, 0, 1]]
    with pytest.raises(InputError, match="target: a series of the classes 2, 1; accepted: all classes"):
        EntropySelector(1, target=two.value_counts())
    assert EntropySelector(1, target=frame.loc["c"]).target.tolist() == [0.75, 0, 0.25]


def test_series_keep_the_order_of_the_first_from_call_to_call() -> None:
    first, other = pd.Series({"x": 3, "y": 1}), pd.Series({"y": 2, "x": 5})
    frame = pd.DataFrame({"y": [2], "x": [5]})
    for counts, ids in (({"b": other}, None), ([other], ["b"]), (frame, ["b"])):
        selector = EntropySelector(1)
        selector.register({"a": first})
        for tell in (selector.register, selector.update):
            with pytest.raises(InputError, match=r"classes y, x; accepted: .* \(x, y, as named before\)"):
                tell(counts, ids=ids)
        assert selector.clients == ("a",)
        selector.register({"b": other[["x", "y"]], "c": [7, 0]})
        selector.register(frame[["x", "y"]], ids=["d"])
        selector.register(pd.DataFrame([[4, 4]]), ids=["e"])
        selector.register({"f": pd.Series([6, 0])})  # 0 and 1 are places and no names
        assert selector.counts.tolist() == [[3, 1], [5, 2], [7, 0], [5, 2], [4, 4], [6, 0]]
    numbered = EntropySelector(1)
    numbered.register({"a": pd.Series([6, 0])})
    numbered.register({"b": first})
    with pytest.raises(InputError, match=r"^counts: a data frame of the classes y, x; .* \(x, y, as named before\)"):
        numbered.register(frame)

    class Arrow:
        """A table whose columns are arrays and no names."""

        def __init__(self, table: Any) -> None:
            self.table = np.asarray(table)
            self.columns = list(self.table.T)

        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
            return self.table

    arrow = EntropySelector(1)
    arrow.register(Arrow([[1, 2]]), ids=["a"])
    arrow.register(Arrow([[3, 4]]), ids=["b"])
    assert arrow.counts.tolist() == [[1, 2], [3, 4]]
    by_columns = EntropySelector(1)
    by_columns.register(frame, ids=["a"])
    with pytest.raises(InputError, match=r"client 'b': .* x, y; accepted: .* \(y, x, as named before\)"):
        by_columns.register({"b": first})


def test_masked_counts_are_refused() -> None:
    masked = np.ma.masked_equal([1, 2, 3], 2)
    for counts, words in (
        (np.ma.masked_equal(TABLE, 5), "counts"),
        ({"a": [1, 2, 3], "b": masked}, "client 'b': label counts"),
        ([masked, [1, 2, 3]], "client 0: label counts"),
    ):
        with pytest.raises(InputError, match=f"^{words}: masked values; accepted: numbers"):
            EntropySelector(1).register(counts)
    with pytest.raises(InputError, match=r"^target: masked values; accepted: numbers"):
        EntropySelector(1, target=masked)
    whole = EntropySelector(1)
    whole.register({"a": np.ma.array([1, 2, 3])})
    assert whole.counts.tolist() == [[1, 2, 3]]


class Row(NamedTuple):
    index: int
    other: int


def test_what_else_is_called_index_is_no_list_of_classes() -> None:
    selector = EntropySelector(1)
    selector.register({"a": Row(3, 1), "b": Row(0, 2)})
    assert selector.counts.tolist() == [[3, 1], [0, 2]]


def test_a_table_read_in_pieces_is_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "_CHUNK_CELLS", 8)  # two clients at a time
    table = np.arange(1, 29).reshape(7, 4)
    selector = EntropySelector(1)
    selector.register(table)
    assert selector.counts.tolist() == table.tolist()


def test_rows_one_by_one() -> None:
    rows = Rows.from_lengths(np.array([1, 2, 0, 1]), np.array([4, 0, 2, 1], np.int32), np.array([7.0, 5.0, 3.0, 9.0]))
    part = rows.part(1, 4)
    assert [[entry.tolist() for entry in part.row(i)] for i in range(3)] == [
        [[0, 2], [5.0, 3.0]],
        [[], []],
        [[1], [9.0]],
    ]
    nothing = Rows.concatenate([])
    assert (len(nothing), nothing.classes.size, nothing.values.size) == (0, 0, 0)


def test_a_sum_beyond_whole_numbers_stays_a_float() -> None:
    selector = EntropySelector(1025)
    selector.register(np.full((1025, 2), 2**53))
    assert selector.select().label_counts.tolist() == [1025 * 2.0**53] * 2
