"""Where a model's last linear layer is: what FedConcat, and weights for other classes, put another in the place of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from fedentopt.errors import InputError

_MARK = "_fedentopt_head"  # in the model's own dictionary, so that copies have it too


@contextmanager
def marking_head(model: nn.Module) -> Iterator[None]:
    """A forward pass inside tells which linear layer comes last, which the order of registration need not."""
    called: list[str] = []

    def noting(name: str) -> None:
        called.append(name)

    hooks = [
        layer.register_forward_hook(lambda *_, name=name: noting(name))
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    if called:
        vars(model)[_MARK] = called[-1]


def find_head(model: nn.Module) -> str | None:
    """Qualified name of the `nn.Linear` that was called last, or else was registered last; None without any."""
    names = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    return vars(model).get(_MARK, names[-1] if names else None)


def head_name(model: nn.Module) -> str:
    """The same, where there must be one: a model without is refused."""
    name = find_head(model)
    if name is None:
        raise InputError(f"model: {type(model).__name__} has no nn.Linear layer, so no last layer can be told apart")
    return name
