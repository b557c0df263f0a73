"""The methods known by name: one line of declaration beside each class, and everything else is made from it.

Command line, TOML, docs tables and the names of methods read the registries of `algorithms` and `selection`; nothing
outside those two rooms spells a method's name, except the paper's cells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from fedentopt.errors import InputError
from fedentopt.settings import Setting, settings_of

T = TypeVar("T")
C = TypeVar("C", bound=type)


class Registry(Generic[T]):
    """Classes by name. `kind` is what an error calls them: algorithm, selector."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._classes: dict[str, type[T]] = {}
        self._options: dict[str, tuple[str, Setting]] | None = None  # made when first asked for

    def register(self, name: str, *, label: str) -> Callable[[C], C]:
        """Class decorator: the class goes by `name` on the command line and by `label` in tables."""

        def declare(cls: C) -> C:
            if name in self._classes:
                raise ValueError(f"two {self.kind}s are called {name!r}")
            cls.name, cls.label = name, label  # type: ignore[attr-defined]
            self._classes[name] = cls
            self._options = None
            return cls

        return declare

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in the order of declaration."""
        return tuple(self._classes)

    def __contains__(self, name: object) -> bool:
        return name in self._classes

    def __iter__(self) -> Iterator[type[T]]:
        return iter(self._classes.values())

    def get(self, name: str) -> type[T]:
        """The class of that name; an unknown one is refused."""
        if name not in self._classes:
            raise InputError(
                f"{self.kind}: {name!r} is unknown; accepted: {', '.join(self.names)} or package.module:factory"
            )
        return self._classes[name]

    def label(self, name: str) -> str:
        """How tables write the name; a name that is not known, as it is."""
        return str(getattr(self._classes.get(name), "label", name))

    def settings(self, name: str) -> dict[str, Setting]:
        """The settings of the class of that name."""
        return settings_of(self.get(name))

    def options(self) -> dict[str, tuple[str, Setting]]:
        """The settings that have a command-line option of their own: name of the class and setting, by option."""
        if self._options is None:
            self._options = {
                declared.option: (name, declared)
                for name in self.names
                for declared in self.settings(name).values()
                if declared.option is not None
            }
        return self._options

    def describe(self) -> list[dict[str, Any]]:
        """Every class with its label, first sentence and settings, for listings and docs."""
        return [
            {
                "name": name,
                "label": self.label(name),
                "needs": sorted(getattr(cls, "needs", ())),
                "reads_label_counts": bool(getattr(cls, "reads_label_counts", False)),
                "sizes_only": bool(getattr(cls, "sizes_only", False)),
                "own_weights": bool(getattr(cls, "own_weights", False)),
                "largest": getattr(cls, "largest", None),
                "leaves_client": list(getattr(cls, "leaves_client", tuple)()),
                "about": " ".join((cls.__doc__ or "").split("\n\n")[0].split()),
                "settings": [
                    {"name": s.name, "default": s.default, "help": s.help, "accepted": s.bounds(), "option": s.option}
                    for s in self.settings(name).values()
                ],
            }
            for name, cls in self._classes.items()
        ]
