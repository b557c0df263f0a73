"""A checkpoint as one file, so that one rename is the moment from which a run continues there.

What a method remembers of single clients lies in files beside it, which it names (`vector_files`).

Tensors lie in it as safetensors; the rest (settings of the run, the rounds so far, the engine's own notes) is
JSON in the header, or beside the tensors where it is longer than headers may be. A checksum covers both, since
safetensors alone notices a cut file but not a changed one.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedentopt.errors import InputError
from fedentopt.files import write_aside
from fedentopt.results.checked_files import plain_settings
from fedentopt.results.records import Checkpoint, RoundRecord, RunIdentity
from fedentopt.results.vector_files import VectorFiles

if TYPE_CHECKING:
    import torch

KEY = "fedentopt"  # of the one entry in the file's header
LONG, MOST_IN_HEADER = "fedentopt-json", 16 << 20  # safetensors refuses headers beyond 100 million bytes
REMEDY = "delete the file, or start the run again with --no-resume"


def save_checkpoint(
    path: Path, config: RunIdentity, checkpoint: Checkpoint, records: Sequence[RoundRecord], files: VectorFiles
) -> None:
    """Write the checkpoint and the records up to it, completely or not at all."""
    state = {
        "config": config.to_dict(),
        "round": checkpoint.round,
        "records": [dataclasses.asdict(record) for record in records],
        "meta": checkpoint.meta,
        "vectors": files.write(checkpoint.rows),
    }
    save_tensors(path, checkpoint.tensors, state)
    files.clean()


def load_checkpoint(path: Path, config: RunIdentity, files: VectorFiles) -> tuple[Checkpoint, list[RoundRecord]]:
    """Read a checkpoint back. One that cannot be read, or is another run's, is an `InputError`; nothing is deleted."""
    tensors, state = load_tensors(path)
    try:
        theirs = plain_settings(state["config"])
        records = [_record(fields) for fields in state["records"]]
        rows = files.open(state.get("vectors", ()))  # older versions have all vectors among the tensors
        checkpoint = Checkpoint(round=state["round"], tensors=tensors, meta=state["meta"], rows=rows)
    except InputError:  # a file beside it, by its own name
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: is no checkpoint of this version of fedentopt; {REMEDY}") from error
    ours = json.loads(json.dumps(config.to_dict()))
    if theirs != ours:
        names = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
        raise InputError(f"{path}: belongs to a run with other settings ({', '.join(names)}); {REMEDY}")
    return checkpoint, records


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor], about: Mapping[str, Any]) -> None:
    """Write tensors (of any device) and JSON as one safetensors file, completely or not at all."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    def fill(aside: Path) -> None:
        try:
            save_file(own, str(aside), metadata=header)
        except SafetensorError as error:  # a disk that is full, in its own words
            raise OSError(str(error)) from error

    own: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        own[name] = _own(tensor, seen)
    text = json.dumps(about)
    if len(text) > MOST_IN_HEADER:
        own[LONG], text = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8), ""
    # One entry only: safetensors writes several in an order that changes from process to process.
    header = {KEY: f"{_checksum(own, text)} {text}"}
    write_aside(path, fill)


def load_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Read what `save_tensors` wrote, on the CPU; a cut or changed file is an `InputError`."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            header = dict(file.metadata() or {}).get(KEY, "")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error}); {REMEDY}") from error
    checksum, _, text = header.partition(" ")
    if checksum != _checksum(tensors, text):
        raise InputError(f"{path}: was changed or damaged (its checksum does not fit); {REMEDY}")
    if LONG in tensors:
        text = tensors.pop(LONG).numpy().tobytes().decode()
    about: dict[str, Any] = json.loads(text)
    return tensors, about


def _record(fields: dict[str, Any]) -> RoundRecord:
    lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    return RoundRecord(**{**fields, **lists})


def _own(tensor: torch.Tensor, seen: set[int]) -> torch.Tensor:
    """A contiguous CPU tensor with memory of its own: safetensors refuses tensors that share theirs."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.untyped_storage().nbytes() != tensor.nbytes or tensor.data_ptr() in seen:
        tensor = tensor.clone()
    seen.add(tensor.data_ptr())
    return tensor


def _checksum(tensors: Mapping[str, torch.Tensor], text: str) -> str:
    import torch

    value = zlib.crc32(text.encode())
    for name in sorted(tensors):
        value = zlib.crc32(name.encode(), value)
        value = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, value)
    return f"{value:08x}"
