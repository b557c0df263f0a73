"""Flower collects garbage after each reply that it reads, which takes most of the time of tests in one process."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True)
def no_collection_after_each_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "collect", lambda *_: 0)
