"""Clients whose local objective is code: the method's own function gives the loss of a batch, autograd its gradient.

The function may do anything that torch allows, so nothing here is captured in a graph, and batches come at their real
size. It is called as `algorithms.local_code` says; the SGD step that follows is everybody's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from fedentopt.algorithms.local_code import Batch, LocalContext, Outputs
from fedentopt.errors import InputError
from fedentopt.models import head_name
from fedentopt.own_code import describe_error, is_of_handler
from fedentopt.simulation.trainers.bound_model import BoundModel
from fedentopt.simulation.work import LocalCode


class CodeObjective:
    """Beside one worker's or slot's model: the start and the previous model of the client it trains, as modules.

    It is made with the first client that needs it, the second module with the first client that has trained before.
    """

    def __init__(self, bound: BoundModel, model: nn.Module, *, bf16: bool) -> None:
        self._bound, self._model, self._bf16 = bound, model, bf16
        self._device = bound.row.device.type
        self._start = self._frozen()
        self._previous: BoundModel | None = None
        self._generator = torch.Generator(device=bound.row.device)
        self._places = self._where()
        self._code: LocalCode | None = None
        self._context: LocalContext | None = None

    def _frozen(self) -> BoundModel:
        return BoundModel(self._model, self._bound.layout, self._bound.row.device, trains=False)

    def _where(self) -> list[tuple[int, int]]:
        """Which parameters the model has, and where their numbers lie: in the row that is averaged, or nowhere."""
        return [(id(parameter), parameter.data_ptr()) for parameter in self._bound.module.parameters()]

    @staticmethod
    def _take(bound: BoundModel, row: torch.Tensor) -> nn.Module:
        bound.load(row)
        return bound.module.eval().requires_grad_(False)  # the client before may have left it otherwise

    def begin(self, code: LocalCode, start: torch.Tensor, lr: float) -> None:
        """Take over a client that starts from the model `start` (width,)."""
        self._take(self._start, start)
        previous = None
        if code.previous is not None:
            self._previous = self._previous or self._frozen()
            previous = self._take(self._previous, code.previous)
        self._code = code
        self._context = LocalContext(
            code.client,
            code.round,
            code.label_counts,
            lr,
            code.vectors,
            previous,
            self._outputs,
            self._flat,
            self._generator.manual_seed(code.key >> 1),
        )

    def backward(self, x: torch.Tensor, y: torch.Tensor, *, wants_logits: bool) -> torch.Tensor | None:
        """Write the gradient of the client's loss on a batch; if wanted, the plain logits (B, C) of the model as it is.

        Those come from the function's own first pass of the whole batch. A function without such a pass costs one more,
        in evaluation mode: in training mode it would move the statistics of BatchNorm.
        """
        code, context, module = self._code, self._context, self._bound.module
        assert code is not None
        assert context is not None
        self._bound.reset()
        with _noting_logits(module, x, wanted=wants_logits) as noted:
            try:
                with self._autocast():
                    loss = code.loss(module, self._start.module, Batch(x, y), context)
            except torch.OutOfMemoryError:
                raise  # the engine takes fewer clients at once then
            except (Exception, SystemExit) as error:
                _refuse(error, code, "local_loss")
                raise
        _check(loss, code.method)
        if self._where() != self._places:
            raise InputError(
                f"algorithm: {code.method}: local_loss gave the model other parameters, or moved them, as double() "
                f"does; accepted: their numbers changed in place"
            )
        self._bound.clear_gradient()
        try:
            loss.backward()
        except torch.OutOfMemoryError:
            raise
        except (Exception, SystemExit) as error:
            _refuse(error, code, "the gradient of local_loss")
            raise
        if not wants_logits:
            return None
        if not noted:
            with self._autocast():
                noted.append(self._bound.logits(x))
        return noted[0]

    def _autocast(self) -> torch.autocast:
        # Without a cache of weights in bf16: the function may change weights between two passes.
        return torch.autocast(self._device, torch.bfloat16, enabled=self._bf16, cache_enabled=False)

    def _outputs(self, model: nn.Module, x: torch.Tensor) -> Outputs:
        """See `LocalContext`."""
        entered: list[torch.Tensor] = []
        head = model.get_submodule(head_name(self._model))
        hook = head.register_forward_pre_hook(lambda layer, inputs: entered.append(inputs[0]))
        try:
            logits = model(x)
        finally:
            hook.remove()
        return Outputs(entered[-1].float(), logits.float())

    def _flat(self, model: nn.Module) -> torch.Tensor:
        """See `LocalContext`: in a row's order, with zeros where it has padding."""
        layout, parts, end = self._bound.layout, [], 0
        for slot in layout.parameters:
            values = model.get_parameter(slot.name)
            if slot.offset > end:
                parts.append(values.new_zeros(slot.offset - end))
            plain = values.permute(0, 2, 3, 1) if slot.channels_last else values
            parts.append(plain.reshape(-1))
            end = slot.offset + slot.size
        if layout.parameter_width > end:
            parts.append(self._bound.row.new_zeros(layout.parameter_width - end))
        return torch.cat(parts)


@contextlib.contextmanager
def _noting_logits(module: nn.Module, x: torch.Tensor, *, wanted: bool) -> Iterator[list[torch.Tensor]]:
    """What `module` says inside to this very batch, the first time it is asked."""
    noted: list[torch.Tensor] = []
    if not wanted:
        yield noted
        return

    def note(module: nn.Module, inputs: tuple[object, ...], output: torch.Tensor) -> None:
        if not noted and inputs and inputs[0] is x:
            noted.append(output.detach().float().clone())  # the function may go on to change it in place

    hook = module.register_forward_hook(note)
    try:
        yield noted
    finally:
        hook.remove()


def _refuse(error: BaseException, code: LocalCode, what: str) -> None:
    """Refuse what the user's own code raised. In a method of ours without any of it, it is a bug, or the end of the
    process that somebody asked for, and passes, as does what a handler of signals raises."""
    if is_of_handler(error):
        return
    if code.own == "algorithm":
        raise InputError(f"algorithm: {code.method}: {what} raised {describe_error(error)}") from error
    if code.own is not None and not isinstance(error, InputError):
        raise InputError(f"{code.own}: {what} of {code.method} raised {describe_error(error)}") from error


def _check(loss: object, method: str) -> None:
    accepted = "accepted: a scalar tensor that depends on the model"
    if not isinstance(loss, torch.Tensor):
        raise InputError(f"algorithm: {method}: local_loss returned {type(loss).__name__}; {accepted}")
    if loss.dim():
        raise InputError(f"algorithm: {method}: local_loss returned a tensor of shape {tuple(loss.shape)}; {accepted}")
    if loss.grad_fn is None:
        raise InputError(
            f"algorithm: {method}: local_loss returned a number that does not depend on the model; {accepted}"
        )
