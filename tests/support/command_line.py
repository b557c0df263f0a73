"""The command line as a user meets it: words in; exit code, standard output and standard error out."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from fedentopt.cli import main


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str


def commander(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """A function that runs `fedentopt WORDS` in this process, as if in a terminal of so many columns."""

    def command(*words: object, columns: int = 160) -> Said:
        monkeypatch.setattr(sys, "argv", ["fedentopt", *map(str, words)])
        monkeypatch.setenv("COLUMNS", str(columns))
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        said = capsys.readouterr()
        return Said(code, said.out, said.err)

    return command
