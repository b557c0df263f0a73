"""A user's own model, selector or algorithm: found by `package.module:factory`, and known again by its source. One that
was handed over as it is: `own_objects`.

The identity of a run includes the code behind such a name: a digest over the module's source and over the modules
beside it that it imports. A file that was edited since this process imported it is imported anew, so that what runs is
what was digested.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from fedentopt.errors import InputError

_LOADED: dict[str, str] = {}  # digest of a module's sources when it was imported here, by module name


def is_import_path(name: str) -> bool:
    """Whether a setting names code of the user's."""
    module, _, attribute = name.partition(":")
    return bool(module) and bool(attribute)


def find_own(setting: str, path: str) -> Any:
    """Import the factory behind `path`; modules of the current directory count.

    Refused, naming the setting: no such module or attribute, something that cannot be called, and any exception that
    the user's code raises on the way.
    """
    with importing_from_here():
        return _find(setting, path)


def make_own(setting: str, path: str, *arguments: Any, **settings: Any) -> Any:
    """Import the factory behind `path` and call it; an exception it raises is refused in one line."""
    with importing_from_here():
        return call_own(setting, path, _find(setting, path), *arguments, **settings)


def call_own(setting: str, path: str, factory: Any, *arguments: Any, **settings: Any) -> Any:
    """Call own code that goes by the name `path`; an exception it raises is refused in one line."""
    try:
        return factory(*arguments, **settings)
    except InputError:
        raise
    except (Exception, SystemExit) as error:  # a script that ends itself must not end the command unheard
        if is_of_handler(error):
            raise
        raise InputError(f"{setting}: calling {path} raised {describe_error(error)}") from error


def code_digest(paths: Iterable[str]) -> str:
    """SHA-256 of the sources behind these import paths; empty where there are none, or none can be found."""
    names = sorted({path.partition(":")[0] for path in paths if is_import_path(path)})
    with importing_from_here():
        parts = [f"{name} {digest}" for name in names if (digest := _module_digest(name))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest() if parts else ""


def describe_error(error: BaseException) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def is_ours(thing: object) -> bool:
    """Whether something is of a class of this package; one that a user has registered under a name is not."""
    return type(thing).__module__.partition(".")[0] == "fedentopt"


def is_of_handler(error: BaseException) -> bool:
    """Whether a handler of signals raised an exception, as in a script that ends on SIGTERM or after some time, and own
    code was only what it interrupted. Python hands such a function the very frame that stands above it."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(interrupted is given for interrupted, frame in pairwise(frames) for given in _arguments(frame))


def _arguments(frame: FrameType) -> list[Any]:
    names, more, _, values = inspect.getargvalues(frame)
    return [*(values.get(name) for name in names), *(values.get(more, ()) if more else ())]


def _find(setting: str, path: str) -> Any:
    module, _, attribute = path.partition(":")
    if not is_import_path(path):
        raise InputError(f"{setting}: {path!r} is not of the form package.module:factory")
    if module.endswith(".py") or module.startswith(".") or "/" in module or "\\" in module:
        name = re.split(r"[/\\]", module.removesuffix(".py"))[-1].lstrip(".")
        raise InputError(
            f"{setting}: {path!r} names a file; accepted: a module and what is in it, such as {name}:{attribute}, "
            f"given in the folder of {name}.py"
        )
    try:
        found: Any = _import(module)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(error.name + ".")):
            where = "nor in the current directory"
            raise InputError(f"{setting}: no module {error.name!r} for {path!r}, {where}") from error
        raise InputError(f"{setting}: importing {module} raised {describe_error(error)}") from error
    except (Exception, SystemExit) as error:
        if is_of_handler(error):
            raise
        raise InputError(f"{setting}: importing {module} raised {describe_error(error)}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise InputError(f"{setting}: {module} has no attribute {attribute!r}{_made_in(module)}")
        found = getattr(found, part)
    if not callable(found):
        raise InputError(f"{setting}: {path} is {type(found).__name__}; accepted: a callable factory")
    return found


def _made_in(module: str) -> str:
    """What a module offers of its own, for a refusal; nothing where that is nothing."""
    found = vars(sys.modules[module]).items()
    own = [name for name, value in found if callable(value) and getattr(value, "__module__", "") == module]
    own = [name for name in own if not name.startswith("_")]
    return f"; accepted: {', '.join(own)}" if own else ""


def _import(name: str) -> ModuleType:
    """Import a module, anew if this process imported it before and its sources have changed since."""
    if name in sys.modules and (_module_digest(name) != _LOADED[name] if name in _LOADED else _is_stale(name)):
        for beside, path in _sources(name).items():
            sys.modules.pop(beside, None)
            with suppress(NotImplementedError, OSError):  # cached bytecode is known by second and size alone
                Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)
    module = importlib.import_module(name)
    _LOADED[name] = _module_digest(name)
    return module


def _is_stale(name: str) -> bool:
    """Whether a module that somebody else imported, or one beside it, has another source now than it was made from."""
    for beside, path in _sources(name).items():
        loaded = sys.modules.get(beside)
        cached = getattr(loaded, "__cached__", None)
        if loaded is None or cached is None:
            continue
        try:
            noted = int.from_bytes(Path(cached).read_bytes()[8:12], "little")  # seconds, as importlib writes them
            if noted != int(path.stat().st_mtime) & 0xFFFFFFFF:
                return True
        except OSError:
            continue
    return False


def _module_digest(name: str) -> str:
    """Over the module's source and the modules beside it that it imports, by name; empty without a source."""
    digest = hashlib.sha256()
    sources = _sources(name)
    for module, path in sorted(sources.items()):
        digest.update(module.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest() if sources else ""


def _sources(name: str) -> dict[str, Path]:
    """Source files by module: the module's own, and below the folder that holds it (or its package) all it imports.

    Of an installed package only its own modules: what lies beside it there is everybody's.
    """
    origin = _origin(name)
    if origin is None:
        return {}
    root = origin.parent
    for _ in range(name.count(".") + (origin.name == "__init__.py")):
        root = root.parent
    installed = root.name in ("site-packages", "dist-packages")
    found: dict[str, Path] = {}
    waiting = [name]
    while waiting:
        module = waiting.pop()
        path = _below(root, module)
        stranger = installed and module.partition(".")[0] != name.partition(".")[0]
        if path is None or module in found or stranger:
            continue
        found[module] = path
        waiting += _imports(path, module)
        parent = module.rpartition(".")[0]
        if parent:
            waiting.append(parent)
    return found


def _origin(name: str) -> Path | None:
    """The file a module comes from, found without running it where it is not imported yet."""
    loaded = sys.modules.get(name)
    text = getattr(loaded, "__file__", None)
    if text is None and loaded is None:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError, AttributeError):
            return None
        text = None if spec is None else spec.origin
    path = None if text is None else Path(text)
    return path if path is not None and path.suffix == ".py" and path.is_file() else None


def _below(root: Path, module: str) -> Path | None:
    base = root.joinpath(*module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


def _imports(path: Path, module: str) -> tuple[str, ...]:
    """Names of modules that a source file may import; those that do not lie beside it are sorted out later."""
    return _imports_of(path.read_bytes(), module if path.name == "__init__.py" else module.rpartition(".")[0])


@functools.lru_cache(maxsize=256)  # every model that is built asks again; to parse takes longer than to build
def _imports_of(source: bytes, package: str) -> tuple[str, ...]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ()
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".") if package else []
                kept = parts[: len(parts) - node.level + 1]
                base = ".".join([*kept, *([node.module] if node.module else [])])
            names += [base, *(f"{base}.{alias.name}" if base else alias.name for alias in node.names)]
    return tuple(name for name in names if name)


@contextmanager
def importing_from_here(*, last: bool = False) -> Iterator[None]:
    """Let modules of the current directory be imported, as from a script there, when own code is loaded; `last`: after
    all others, while it runs. It may import a file beside it as late as in a function, but libraries import late too,
    and a `profile.py` there is not what they mean."""
    here = str(Path.cwd())
    sys.path.insert(len(sys.path) if last else 0, here)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        places = [place for place, folder in enumerate(sys.path) if folder == here]
        if places:
            del sys.path[places[-1 if last else 0]]
