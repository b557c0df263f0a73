"""Selectors that are told what is no number: it counts as not told, whoever passed it on."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest

from fedentopt.selection import SELECTORS, Head, Observation


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["rpow-d", "oort", "hics-fl", "divfl", "clustered-update"])
def test_what_is_not_finite_is_left_out(name: str, bad: float) -> None:
    def told(value: float) -> Observation:
        rows = np.array([[value, 1.0], [2.0, -1.0]], np.float32)
        return Observation(5, value, value, Head(rows, rows[0]), rows.ravel(), abs(value))

    made = []
    for last in (Observation(5), told(bad)):
        selector = SELECTORS.get(name)(2, seed=1)
        selector.register(np.arange(1, 11).reshape(5, 2))
        selector.select()
        selector.observe({k: told(0.5 + k) for k in range(4)} | {4: last})
        made.append(selector)
    silent, loud = made
    state = loud.state_dict()
    assert json.loads(json.dumps(state, allow_nan=False)) == silent.state_dict()
    again = SELECTORS.get(name)(2, seed=1)
    again.register(np.arange(1, 11).reshape(5, 2))
    again.load_state_dict(state)
    if loud.arrays():
        again.load_arrays(loud.arrays())
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert silent.select().clients == loud.select().clients == again.select().clients
