"""The built-in data set, and what is common to all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedentopt.datasets import default_image_size, digits, load, resolve_data_dir
from fedentopt.datasets.dataset import held_out
from fedentopt.errors import InputError


def test_digits_need_no_files_and_keep_every_class_in_both_splits(tmp_path: Path) -> None:
    data = load("digits", tmp_path)
    assert data.x_train.shape == (1438, 1, 32, 32)
    assert data.x_test.shape == (359, 1, 32, 32)
    shares = np.bincount(data.y_test) / np.bincount(np.concatenate([data.y_train, data.y_test]))
    assert np.all(np.abs(shares - 0.2) < 0.01)
    assert data.x_train.max() == 255
    assert data.mean == (data.mean[0],) * 3
    assert data.mean[0] == pytest.approx(np.asarray(data.x_train).mean() / 255)
    assert not any(tmp_path.iterdir())


def test_digits_are_scikit_learns_images_scaled_to_bytes() -> None:
    from sklearn.datasets import load_digits

    data = load("digits", image_size=8)
    everything = np.concatenate([data.x_train, data.x_test])[:, 0]
    original = load_digits().images
    assert sorted(everything.reshape(1797, -1).sum(1)) == sorted(np.rint(original * 255 / 16).reshape(1797, -1).sum(1))


@pytest.mark.parametrize("moved", [False, True])
def test_digits_are_scikit_learns_wherever_it_keeps_them(monkeypatch: pytest.MonkeyPatch, moved: bool) -> None:
    from sklearn.datasets import load_digits

    if moved:
        monkeypatch.setattr(digits, "find_spec", lambda name: None)
    table, bunch = digits._table(), load_digits()
    np.testing.assert_array_equal(table[:, :-1].reshape(-1, 8, 8), bunch.images)
    np.testing.assert_array_equal(table[:, -1], bunch.target)


def test_the_held_out_fifth_is_fixed_stratified_and_disjoint() -> None:
    labels = np.repeat([3, 5, 9, 1], [50, 3, 2, 1])
    train, test = held_out(labels)
    assert np.array_equal(np.sort(np.concatenate([train, test])), np.arange(56))
    assert {label: int((labels[test] == label).sum()) for label in (3, 5, 9, 1)} == {3: 10, 5: 1, 9: 1, 1: 0}
    again = held_out(labels)
    assert np.array_equal(again[1], test)


def test_the_data_folder_is_the_option_then_the_variable_then_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDENTOPT_DATA", str(tmp_path / "variable"))
    assert resolve_data_dir(tmp_path / "option") == tmp_path / "option"
    assert resolve_data_dir(None) == tmp_path / "variable"
    monkeypatch.delenv("FEDENTOPT_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert "fedentopt" in str(resolve_data_dir(None))


def test_image_sizes() -> None:
    assert [default_image_size(name) for name in ("digits", "cinic10", "pathmnist", "x.npz")] == [32, 32, 224, 32]
    with pytest.raises(InputError, match="image_size: 7 is out of range; accepted: 8 to 1024"):
        load("digits", image_size=7)


def test_an_unknown_name_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"'kmnist' is unknown; accepted: digits, mnist.*\.npz file, or a folder"):
        load("kmnist", tmp_path)
