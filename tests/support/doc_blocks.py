"""Code blocks of Markdown pages, with what their author says about running them."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

RUN = frozenset({"bash", "sh", "shell", "python", "py"})
SHELL = frozenset({"bash", "sh", "shell", "console"})


@dataclass(frozen=True)
class Block:
    """A fenced block. `not_run` is the reason given in a comment before it, `file` the file it claims to show."""

    page: Path
    line: int
    language: str
    code: str
    not_run: str | None
    file: str | None

    @property
    def is_python(self) -> bool:
        return self.language in {"python", "py"}

    @property
    def is_run(self) -> bool:
        return self.language in RUN and self.not_run is None and self.file is None

    def commands(self) -> Iterator[list[str]]:
        """Every call of `fedentopt` in a shell block, as words."""
        if self.language not in SHELL:
            return
        for line in self.code.replace("\\\n", " ").splitlines():
            words: list[list[str]] = [[]]
            lexer = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars=True)
            lexer.whitespace_split = True
            for token in lexer:
                if set(token) <= set("|&;<>()"):
                    words.append([])
                else:
                    words[-1].append(token)
            for command in words:
                bare = [word for word in command if not re.fullmatch(r"[A-Z_]+=.*", word)]
                if bare and bare[0].rsplit("/", 1)[-1] == "fedentopt":
                    yield bare[1:]


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order; a fence that is never closed is an error."""
    found = []
    lines = page.read_text(encoding="utf-8").splitlines()
    comment = ""
    at = 0
    while at < len(lines):
        fence = re.fullmatch(r"(\s*)```\s*([\w-]*).*", lines[at])
        if fence is None:
            if lines[at].strip():
                comment = lines[at].strip()
            at += 1
            continue
        end = next((i for i in range(at + 1, len(lines)) if lines[i].strip() == "```"), None)
        assert end is not None, f"{page.name}:{at + 1}: the block is never closed"
        not_run = re.fullmatch(r"<!--\s*not run:\s*(.+?)\s*-->", comment)
        file = re.fullmatch(r"<!--\s*file:\s*(.+?)\s*-->", comment)
        found.append(
            Block(
                page=page,
                line=at + 1,
                language=fence[2].lower(),
                code=textwrap.dedent("\n".join(lines[at + 1 : end])) + "\n",
                not_run=not_run[1] if not_run else None,
                file=file[1] if file else None,
            )
        )
        comment = ""
        at = end + 1
    return found
