"""A user's own model: "package.module:factory", where factory(num_classes) returns an `nn.Module`."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedentopt.errors import InputError


def own_model(spec: str, num_classes: int) -> nn.Module:
    """Import the factory (the current directory counts as importable) and call it.

    Refused: no such module or attribute, an exception in either, a result that is no `nn.Module`.
    """
    with _current_directory_importable():
        factory = _find(spec)
        try:
            model = factory(num_classes)
        except Exception as error:
            raise InputError(f"model: {spec}({num_classes}) raised {_told(error)}") from error
    if not isinstance(model, nn.Module):
        raise InputError(f"model: {spec}({num_classes}) returned {type(model).__name__}; accepted: torch.nn.Module")
    return model


def check_own_model(model: nn.Module, spec: str, num_classes: int, image_size: int) -> None:
    """Try a zero image: refused are a failing forward, another width than `num_classes`, unkeyed randomness."""
    images = torch.zeros(2, 3, image_size, image_size)
    model.eval()
    output = _forward(model, images, spec)
    if not isinstance(output, torch.Tensor) or tuple(output.shape) != (2, num_classes):
        got = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        raise InputError(
            f"model: {spec} gives {got} for images of shape {tuple(images.shape)}; accepted: one row of "
            f"{num_classes} logits an image, (2, {num_classes})"
        )
    model.train()
    before = torch.default_generator.get_state()
    _forward(copy.deepcopy(model), images, spec)  # a copy: batch statistics must stay untouched
    if not torch.equal(before, torch.default_generator.get_state()):
        raise InputError(
            f"model: {spec} draws from torch's global generator while training (such as torch.nn.functional.dropout); "
            "accepted: nn.Dropout layers, whose masks can be keyed"
        )


def _find(spec: str) -> Callable[[int], Any]:
    module_name, _, attribute = spec.partition(":")
    if not module_name or not attribute:
        raise InputError(f"model: {spec!r} is not of the form package.module:factory")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise InputError(f"model: no module {error.name!r} for {spec!r}, nor in the current directory") from error
        raise InputError(f"model: importing {module_name} raised {_told(error)}") from error
    except Exception as error:
        raise InputError(f"model: importing {module_name} raised {_told(error)}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise InputError(f"model: {module_name} has no attribute {attribute!r}")
        found = getattr(found, part)
    if not callable(found):
        raise InputError(f"model: {spec} is {type(found).__name__}; accepted: a callable factory(num_classes)")
    return found  # type: ignore[no-any-return]


@contextmanager
def _current_directory_importable() -> Iterator[None]:
    here = str(Path.cwd())
    sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        if here in sys.path:
            sys.path.remove(here)


def _forward(model: nn.Module, images: torch.Tensor, spec: str) -> Any:
    try:
        with torch.no_grad():
            return model(images)
    except Exception as error:
        raise InputError(f"model: {spec} failed on images of shape {tuple(images.shape)}: {_told(error)}") from error


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
