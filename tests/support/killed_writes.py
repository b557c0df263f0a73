"""A process killed in the middle of writing files, for tests of what is left then."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest


class Killed(BaseException):
    """Stands for kill -9: nothing in the code may catch it and tidy up."""


@contextmanager
def killed_after(writes: int) -> Iterator[None]:
    """Inside, so many files are renamed, synchronised or removed; every further one raises `Killed`, in all threads."""
    real = {name: getattr(os, name) for name in ("replace", "fsync", "unlink")}
    calls = 0

    def counted(name: str) -> Callable[..., object]:
        def call(*args: object, **more: object) -> object:
            nonlocal calls
            calls += 1
            if calls > writes:
                raise Killed
            return real[name](*args, **more)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in real:
            patch.setattr(os, name, counted(name))
        yield
