"""Start weights from a local file: safetensors, or a .pth read as plain tensors only."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from fedentopt.errors import InputError
from fedentopt.files import expand_home


def load_weights(model: nn.Module, path: str, head: str | None) -> None:
    """Copy the tensors of a file into `model`, as `copy_tensors` says."""
    file = expand_home(path)
    if not file.is_file():
        raise InputError(f"weights: {file} is not a file; accepted: a local .safetensors or .pth file, or pretrained")
    copy_tensors(model, read_tensors(file, file), path, head)


def copy_tensors(model: nn.Module, found: Mapping[str, Tensor], path: str, head: str | None) -> None:
    """Copy the tensors `found` in `path` into `model`, name by name.

    The last layer (`head`) stays as initialised when the file has none or one of another shape: other
    classes. Every other missing, unknown, misshapen or non-finite tensor is refused by name, but for what the model
    has itself, as a mask of infinities.
    """
    state = model.state_dict()
    mine = set() if head is None else {name for name in state if name.startswith(f"{head}.")}
    same_head = all(name in found and found[name].shape == state[name].shape for name in mine)
    skipped = set() if same_head else mine | {name for name in found if name.startswith(f"{head}.")}
    for name in sorted(set(found) - set(state) - skipped):
        raise InputError(f"weights: {path} holds a tensor {name!r} that the model does not have")
    chosen: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name in skipped:
            chosen[name] = tensor
            continue
        if name not in found:
            raise InputError(f"weights: {path} lacks the tensor {name!r}")
        given = found[name]
        if given.shape != tensor.shape:
            raise InputError(
                f"weights: tensor {name!r} of {path} has shape {tuple(given.shape)}, "
                f"the model's has {tuple(tensor.shape)}"
            )
        if given.is_floating_point() != tensor.is_floating_point():
            raise InputError(f"weights: tensor {name!r} of {path} is {given.dtype}, the model's is {tensor.dtype}")
        same = torch.equal(given.to(tensor.dtype), tensor)
        if given.is_floating_point() and not same and not torch.isfinite(given).all():
            raise InputError(f"weights: tensor {name!r} of {path} holds NaN or infinity")
        chosen[name] = given.to(tensor.dtype)
    model.load_state_dict(chosen)


def read_tensors(content: Path | io.BytesIO, path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name; `content` is the file, or its bytes where it has been read already."""
    try:
        if path.suffix in (".pth", ".pt"):
            tensors = torch.load(content, map_location="cpu", weights_only=True)
        else:
            from safetensors.torch import load, load_file

            tensors = load_file(content) if isinstance(content, Path) else load(content.getvalue())
    except Exception as error:  # both readers raise many kinds for one thing: not such a file
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"weights: {path} cannot be read ({reason}); accepted: safetensors, or .pth with tensors only"
        ) from error
    if not isinstance(tensors, dict) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise InputError(f"weights: {path} is not a plain mapping of names to tensors")
    return tensors
