"""An algorithm's hooks as the engine calls them: what they return is checked, and own code that is wrong is named.

The engine knows an algorithm by its hooks alone. What a hook of a user's own gives in the wrong shape or type, and any
exception it raises, becomes an `InputError` of one line that names the method; an exception of a built-in one is a bug
and passes through.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, replace
from typing import Any, cast

import numpy as np
import torch

from fedentopt.algorithms import (
    ALGORITHMS,
    Algorithm,
    Client,
    LocalTerms,
    Mixing,
    ModelSizes,
    Round,
    SecondStage,
    Vectors,
    overrides,
)
from fedentopt.errors import InputError
from fedentopt.own_code import describe_error, is_of_handler, is_ours
from fedentopt.own_hooks import IF_NAMED, takes

PLAIN = LocalTerms()


class Hooks:
    """One run's algorithm. `name` is what an error calls it; `padding` (P,) says which entries of a flat row hold no
    parameter: they are 0 in all that an algorithm sees and gives, so that norms are right and 0 / 0 there is nothing.
    """

    def __init__(self, algorithm: Algorithm, name: str, padding: torch.Tensor | None) -> None:
        self.algorithm, self.name, self._padding = algorithm, name, padding
        self.own = name not in ALGORITHMS or not is_ours(algorithm)  # a user may have registered one, too
        has = {
            hook
            for hook in ("push", "absorb", "step", "evaluated", "local_loss", "judge", "mix", "local_terms")
            if overrides(algorithm, hook)
        }
        self.pushes, self.absorbs, self.steps = "push" in has, "absorb" in has, "step" in has
        self.evaluates, self.has_code, self.judges = "evaluated" in has, "local_loss" in has, "judge" in has
        self.mixes, self._has_terms = "mix" in has, "local_terms" in has
        self.step_reads_round = self.steps and takes(algorithm.step, IF_NAMED["step"])

    def local_terms(self, client: Client) -> LocalTerms:
        """The local objective of a client; class terms as float arrays (C,)."""
        if not self._has_terms:  # a round asks for every client of every run: no more work than there is
            return PLAIN
        if self.own:
            client = replace(client, label_counts=client.label_counts.copy())
        terms = self._call("local_terms", client)
        if not self.own:
            return cast(LocalTerms, terms)
        if not isinstance(terms, LocalTerms):
            raise self._wrong("local_terms", terms, "LocalTerms")
        shape = client.label_counts.shape
        given: dict[str, Any] = {}
        for field in ("logit_scale", "logit_shift"):
            values = getattr(terms, field)
            if values is not None:
                given[field] = self._numbers("local_terms", field, values, shape, "one per class")
            if values is not None and self.has_code:
                raise self._wrong("local_terms", field, "none beside a local_loss, which sees plain logits")
        if not isinstance(terms.mu, int | float | np.number) or not np.isfinite(terms.mu):
            raise self._wrong("local_terms", f"mu {terms.mu!r}", "a finite number")
        return replace(terms, **given)

    def mix(self, round_: Round) -> Mixing:
        """The server's factors."""
        mixing = self._call("mix", round_)
        if not isinstance(mixing, Mixing):
            raise self._wrong("mix", mixing, "Mixing")
        factors = self._numbers("mix", "factors", mixing.clients, round_.shares.shape, "one per client")
        try:
            own = float(mixing.own)
        except (TypeError, ValueError):
            raise self._wrong("mix", f"own {mixing.own!r}", "a number") from None
        if self.steps and own:
            raise self._wrong("mix", f"own {mixing.own!r}", "0 where step combines")
        return Mixing(own, factors)

    def push(self, vectors: Vectors, rows: int, width: int) -> torch.Tensor:
        """The linear terms of the clients' objectives, (rows, width); one row that is given is everybody's."""
        push = self._call("push", vectors)
        if isinstance(push, torch.Tensor) and push.shape == (width,):
            push = push.expand(rows, width)  # of server vectors alone, which do not tell how many clients train
        return self._tensor("push", push, (rows, width))

    def absorb(self, vectors: Vectors, start: torch.Tensor, trained: torch.Tensor, round_: Round) -> Vectors:
        """The vectors after a round; shapes as before."""
        before = {id(side): {n: v.shape for n, v in side.items()} for side in (vectors.server, vectors.client)}
        self._call("absorb", vectors, start.clone() if self.own else start, trained, round_)
        for side in (vectors.server, vectors.client):
            self._check_vectors("absorb", side, before[id(side)])
        return vectors

    def step(
        self, server: dict[str, torch.Tensor], start: torch.Tensor, trained: torch.Tensor, shares: torch.Tensor,
        round_: Round | None,
    ) -> torch.Tensor:  # fmt: skip
        """The next global parameters; `round_` is for a hook that asks for it."""
        shapes = {name: vector.shape for name, vector in server.items()}
        more = {IF_NAMED["step"]: round_} if self.step_reads_round else {}
        row = self._tensor("step", self._call("step", server, start, trained, shares, **more), tuple(start.shape))
        self._check_vectors("step", server, shapes)
        return row

    def evaluated(self, server: dict[str, torch.Tensor], model: torch.Tensor) -> torch.Tensor:
        """The parameters that are evaluated and saved."""
        return self._tensor("evaluated", self._call("evaluated", server, model), tuple(model.shape))

    def judge(self, soft_labels: np.ndarray, samples: np.ndarray) -> list[int]:
        """Indices of the clients kept, ascending and at least one."""
        kept = self._call("judge", soft_labels, samples)
        try:
            given = np.asarray(list(kept))
        except (TypeError, ValueError, RuntimeError):
            given = np.zeros(0)
        # Not what else turns into numbers: a mask would keep the clients 0 and 1.
        places = sorted(set(given.tolist())) if given.ndim == 1 and given.dtype.kind in "iu" else []
        if not places or places[0] < 0 or places[-1] >= len(samples):
            raise self._wrong("judge", kept, f"at least one index from 0 to {len(samples) - 1}")
        return places

    def groups(self, label_counts: np.ndarray, seed: int) -> np.ndarray | None:
        """The group of every client, or None."""
        found = self._call("groups", label_counts, seed)
        if found is None:
            return None
        try:
            groups = np.asarray(found)
        except ValueError:  # lists of several lengths
            groups = np.zeros(0)
        number = len(label_counts)
        if groups.shape != (number,) or groups.dtype.kind not in "iu" or groups.min() < 0 or groups.max() >= number:
            accepted = f"one whole number from 0 for each of {number} clients, below {number}"
            raise self._wrong("groups", found, accepted)
        return groups.astype(np.int64)

    def second_stage(self, rounds: int, cohort: int, clients: int, sizes: ModelSizes) -> SecondStage | None:
        """How the rounds are divided, each part at least 1, or None."""
        found = self._call("second_stage", rounds, cohort, clients, sizes)
        if found is None:
            return None
        parts = astuple(found) if isinstance(found, SecondStage) else ()
        if not parts or not all(isinstance(part, int | np.integer) and part >= 1 for part in parts):
            raise self._wrong("second_stage", found, "SecondStage of whole numbers, at least 1 each, or None")
        return SecondStage(*(int(part) for part in parts))

    def initial(self, vector: str, *shape: int, device: torch.device) -> torch.Tensor:
        """A vector, or rows of it, before round 1."""
        value = self._call("initial", vector)
        if not isinstance(value, int | float | np.number) or not np.isfinite(value):
            raise self._wrong("initial", f"{value!r} for {vector}", "a finite number")
        filled = torch.full(shape, float(value), device=device)
        return self._clear(filled) if value else filled  # zeros need no second copy, which may be gigabytes

    def _call(self, hook: str, *arguments: Any, **more: Any) -> Any:
        if self.own:  # it may change what it is given, which others read, too
            arguments = tuple(one.copy() if isinstance(one, np.ndarray) else one for one in arguments)
        try:
            return getattr(self.algorithm, hook)(*arguments, **more)
        except (InputError, torch.OutOfMemoryError):
            raise
        except (Exception, SystemExit) as error:
            if not self.own or is_of_handler(error):
                raise
            raise InputError(f"algorithm: {self.name!r}: {hook} raised {describe_error(error)}") from error

    def _numbers(self, hook: str, what: str, given: Any, shape: tuple[int, ...], of: str) -> np.ndarray:
        """Numbers as they are now: own code may give the same array again, with others in it, for the next client."""
        try:
            values = np.array(given)
        except (TypeError, ValueError, RuntimeError):  # lists of several lengths, a tensor that NumPy cannot read
            values = np.zeros(0, dtype=object)
        if values.dtype.kind not in "biuf":
            raise self._wrong(hook, f"{what} {given}", f"{shape} numbers, {of}")
        if values.shape != shape:
            raise self._wrong(hook, f"{what} of shape {values.shape}", f"{shape}, {of}")
        return values.astype(np.float64)

    def _tensor(self, hook: str, value: Any, shape: tuple[int, ...]) -> torch.Tensor:
        if not isinstance(value, torch.Tensor):
            raise self._wrong(hook, type(value).__name__, f"a tensor of shape {shape}")
        if tuple(value.shape) != shape or not value.is_floating_point():
            raise self._wrong(hook, f"{value.dtype} of shape {tuple(value.shape)}", f"floats of shape {shape}")
        return self._clear(value.detach().to(torch.float32))

    def _clear(self, value: torch.Tensor) -> torch.Tensor:
        return value if self._padding is None else value.masked_fill(self._padding, 0.0)

    def _check_vectors(self, hook: str, vectors: dict[str, torch.Tensor], shapes: Mapping[str, torch.Size]) -> None:
        if vectors.keys() != shapes.keys():
            raise self._wrong(hook, f"vectors {sorted(vectors)}", f"{sorted(shapes)}, as declared")
        for name, value in vectors.items():
            vectors[name] = self._tensor(f"{hook} ({name})", value, tuple(shapes[name]))

    def _wrong(self, hook: str, given: Any, accepted: str) -> InputError:
        text = " ".join(str(given).split())
        shown = text if len(text) < 80 else f"{text[:77]}..."
        return InputError(f"algorithm: {self.name!r}: {hook} gave {shown}; accepted: {accepted}")
