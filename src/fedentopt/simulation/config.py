"""One experiment as data: every setting that decides a run's numbers, and nothing that does not.

Where a run executes (device, trainer, workers, folders) is not part of it, so the same config gives the same
run id on every machine.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedentopt.errors import InputError
from fedentopt.own_code import is_import_path
from fedentopt.partition import parse as parse_partition

ALGORITHMS = ("fedavg", "fedprox", "fednova", "scaffold", "fedrs", "fedlc", "fedconcat", "fedentropy")
SELECTORS = ("random", "fedentopt", "kl")
SMALL_DATASETS = ("digits", "brain-tumor-mri")  # where a minimum of 10 samples a client is never met


def _setting(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


def amount(text: str | int, whole: int, name: str) -> int:
    """Read a number of clients or a per cent of `whole` (floored): "10", 10 or "10%"."""
    raw = str(text).strip()
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)%", raw)
    if match:
        # 1e-9 keeps 29 % of 100 at 29 where binary fractions would floor it to 28.
        return math.floor(float(match[1]) * whole / 100 + 1e-9)
    if re.fullmatch(r"\d{1,18}", raw):
        return int(raw)
    shown = f"{text!r}" if len(raw) < 60 else f"{raw[:20]!r}... ({len(raw)} characters)"
    raise InputError(f"{name}: {shown} is neither a number of clients (10) nor a per cent of them (10%)")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A run. Field help texts are the command line's help texts."""

    dataset: str = _setting(
        "digits", "data set: a name from `fedentopt data list`, an .npz file, or a folder of class folders"
    )
    fine_labels: bool = _setting(False, "cifar100: the 100 fine labels instead of the 20 coarse ones")
    image_size: int | None = _setting(None, "side of the square images (default: 32, medical data sets 224)")
    partition: str = _setting("dir:0.1", "label skew: dir:BETA, classes:J or iid")
    min_samples: int | None = _setting(
        None, "fewest samples a client may get under dir:BETA (default 10; 1 for digits and brain-tumor-mri)"
    )
    clients: int = _setting(100, "number of clients, K")
    model: str = _setting("lenet5", "lenet5, vgg11, efficientnet-b0, efficientnet-b3, or package.module:factory")
    weights: str | None = _setting(
        None, "local safetensors file with start weights (such as ImageNet's); the last layer may differ"
    )
    algorithm: str = _setting("fedavg", "fedavg, fedprox, fednova, scaffold, fedrs, fedlc, fedconcat or fedentropy")
    selector: str = _setting("random", "random, fedentopt or kl")
    cohort: str = _setting("10%", "clients a round, M: a number or a per cent of K")
    buffer: str = _setting("50%", "FedEntOpt's buffer, Q: a number or a per cent of K, at most K-M")
    epsilon: float | None = _setting(
        None, "privacy budget of the label counts (Laplace noise of scale 1/epsilon); none: true counts"
    )
    dropout: float = _setting(0.0, "probability that a selected client drops out before it trains")
    stragglers: float = _setting(
        0.0, "share of the clients that may run fewer local epochs (1 to --epochs, drawn each time)"
    )
    rounds: int = _setting(100, "communication rounds")
    epochs: int = _setting(5, "local epochs")
    batch_size: int = _setting(64, "local batch size; the last partial batch is kept")
    lr: float = _setting(0.01, "learning rate of round 1")
    lr_decay: float = _setting(0.98, "factor on the learning rate after every round")
    weight_decay: float = _setting(5e-4, "weight decay")
    momentum: float = _setting(0.9, "momentum; the optimiser starts anew every round")
    mu: float = _setting(1e-4, "FedProx: weight of the proximal term")
    scaffold_variant: str = _setting("niid", "SCAFFOLD: niid (correction after the step) or gradient (inside momentum)")
    fedrs_alpha: float = _setting(0.5, "FedRS: factor on the logits of absent classes")
    fedrs_soft: bool = _setting(
        False, "FedRS: the authors' code's soft version, alpha + (1 - alpha) * share of the largest class"
    )
    fedlc_tau: float = _setting(1.0, "FedLC: strength of the calibration")
    clusters: int = _setting(5, "FedConcat: number of clusters")
    concat_share: float = _setting(0.9, "FedConcat: share of the rounds spent in stage 1")
    concat_max_rounds: int = _setting(
        500, "FedConcat: most rounds of stage 2, whatever the communication budget allows"
    )
    jitter: float = _setting(0.2, "colour jitter: brightness, contrast and saturation vary by this share; 0 is off")
    flip: float = _setting(0.5, "probability of a horizontal flip")
    grayscale: float = _setting(0.1, "probability of turning an image grey")
    evaluate_every: int = _setting(1, "evaluate every n-th round (and always the last ten)")
    precision: str = _setting("fp32", "fp32 (TF32 products on CUDA), fp32-exact or bf16")
    seed: int = _setting(0, "seed of everything that is drawn")

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            # One spelling of a value, so that equal settings have one digest: 1 is 1.0, ten clients are "10".
            object.__setattr__(self, f.name, _read_type(f.name, str(f.type), getattr(self, f.name)))
        self._choice("algorithm", ALGORITHMS, own=True)
        self._choice("selector", SELECTORS, own=True)
        self._choice("scaffold_variant", ("niid", "gradient"))
        self._choice("precision", ("fp32", "fp32-exact", "bf16"))
        parse_partition(self.partition)
        for name in ("clients", "rounds", "epochs", "batch_size", "evaluate_every", "clusters"):
            self._range(name, 1)
        self._range("concat_max_rounds", 10)
        for name in ("mu", "weight_decay", "fedlc_tau", "jitter"):
            self._range(name, 0)
        for name in ("dropout", "stragglers", "flip", "grayscale", "fedrs_alpha"):
            self._range(name, 0, 1)
        self._range("momentum", 0, 1, above=False, below=True)
        self._range("lr", 0, above=True)
        self._range("lr_decay", 0, 1, above=True)
        self._range("concat_share", 0, 1, above=True)
        self._range("seed", 0)
        if self.epsilon is not None:
            self._range("epsilon", 0, above=True)
        if self.image_size is not None:
            self._range("image_size", 8)
        if self.min_samples is not None:
            self._range("min_samples", 0)
        if self.cohort_size < 1 or self.cohort_size > self.clients:
            raise InputError(
                f"cohort: {self.cohort!r} gives {self.cohort_size} of {self.clients} clients; "
                f"accepted: 1 to {self.clients}"
            )
        if self.selector == "fedentopt" and self.buffer_size > self.clients - self.cohort_size:
            raise InputError(
                f"buffer: {self.buffer!r} gives {self.buffer_size} clients; with {self.clients} clients and cohorts of "
                f"{self.cohort_size} at most {self.clients - self.cohort_size} can be kept out"
            )
        if self.algorithm == "fedentropy" and self.selector != "random":
            raise InputError(
                f"selector: {self.selector!r} cannot go with fedentropy, which draws its own clients; accepted: random"
            )

    def _choice(self, name: str, accepted: tuple[str, ...], *, own: bool = False) -> None:
        """`own`: an import path of the user's code is accepted too."""
        value = getattr(self, name)
        if value not in accepted and not (own and is_import_path(value)):
            also = " or package.module:factory" if own else ""
            raise InputError(f"{name}: {value!r} is unknown; accepted: {', '.join(accepted)}{also}")

    def _range(
        self, name: str, low: float, high: float = math.inf, *, above: bool = False, below: bool = False
    ) -> None:
        value = getattr(self, name)
        low_ok = value > low if above else value >= low
        high_ok = value < high if below else value <= high
        if not (low_ok and high_ok and math.isfinite(value)):  # NaN fails every comparison
            bound = f"above {low:g}" if above else f"at least {low:g}"
            if high < math.inf:
                bound += f" and {'below' if below else 'at most'} {high:g}"
            raise InputError(f"{name}: {value!r} is out of range; accepted: {bound}")

    @property
    def cohort_size(self) -> int:
        """Clients a round, M."""
        return amount(self.cohort, self.clients, "cohort")

    @property
    def buffer_size(self) -> int:
        """Buffer of FedEntOpt, Q."""
        return amount(self.buffer, self.clients, "buffer")

    @property
    def least_samples(self) -> int:
        """Fewest samples of a client under dir:BETA."""
        if self.min_samples is not None:
            return self.min_samples
        return 1 if self.dataset in SMALL_DATASETS else 10

    @property
    def method(self) -> str:
        """The method's name: fedavg, fedprox+fedentopt, fedentopt, fedentopt-dp, kl, ..."""
        asks = self.selector != "random" or self.algorithm == "fedconcat"  # methods that read label counts
        suffix = "-dp" if asks and self.epsilon is not None else ""
        names = [_short(self.algorithm)] if self.algorithm != "fedavg" or self.selector == "random" else []
        names += [_short(self.selector)] if self.selector != "random" else []
        return "+".join(names) + suffix

    def to_dict(self) -> dict[str, Any]:
        """All settings, JSON-serialisable."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> RunConfig:
        """Settings by name; an unknown name is refused."""
        known = {f.name for f in dataclasses.fields(cls)}
        for name in settings:
            if name not in known:
                raise InputError(f"{name}: unknown setting; accepted: {', '.join(sorted(known))}")
        return cls(**settings)

    def digest(self) -> str:
        """Eight hexadecimal digits that depend on every setting and on nothing else."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:8]

    @property
    def run_id(self) -> str:
        """Folder name of the run: readable, and unique by the digest at its end."""
        part = self.partition.replace(":", "")
        return f"{self.method}_{_short(self.dataset)}_{part}_{_short(self.model)}_s{self.seed}_{self.digest()}"


def _short(name: str) -> str:
    """A name that can stand in a folder's name; a path or an import path keeps its end."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[-24:].strip("-")


def _read_type(name: str, kind: str, value: Any) -> Any:
    """The value in its field's type, which a TOML file may have missed: whole numbers become floats, and text where a
    number of clients or a per cent is meant. Other types are refused."""
    options = [option.strip() for option in kind.split("|")]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if "None" in options and value is None:
        return None
    if "float" in options and number:
        return float(value)
    if name in ("cohort", "buffer") and number and isinstance(value, int):
        return str(value)
    exact: dict[str, type] = {"str": str, "int": int, "bool": bool}
    if any(type(value) is exact.get(option) for option in options):
        return value
    words = " or ".join("nothing" if option == "None" else option for option in options)
    raise InputError(f"{name}: {value!r} has the wrong type; accepted: {words}")
