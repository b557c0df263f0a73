"""A class with settings whose annotations are types, since nothing here postpones them."""

import typing
from typing import ClassVar, Optional

from fedentopt.settings import Configurable, setting


class Immediate(Configurable):
    a: int = setting(1)
    b: float | None = setting(None)
    c: Optional[float] = setting(None)  # noqa: UP045
    d: typing.Optional[int] = setting(None)  # noqa: UP045
    e: bool = setting(False)
    f: str = setting("x")
    g: tuple[float, ...] = setting(())
    h: "int" = setting(2)
    i: ClassVar[int] = 3
    j: typing.ClassVar[int] = 4
