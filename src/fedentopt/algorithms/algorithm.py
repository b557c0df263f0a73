"""What an algorithm is: three tiers, each optional, and FedAvg where nothing is overridden.

1. *Data.* Every client minimises, by the same SGD step,

       cross-entropy(scale * logits + shift) + (mu / 2) * |w - w_start|^2

   and the server's next model is `own * w + sum_k clients[k] * w_k`: `local_terms` and `mix` give the numbers. One
   training step then serves all algorithms, side by side in one stack, and one matrix product all their servers.
2. *State.* `server_vectors` and `client_vectors` name flat vectors as long as the model's parameters, which the engine
   keeps (filled with `initial`, 0 by default, or with a random network), stacks, moves, checkpoints and counts. `push`
   is a linear term of the local objective made of them, `absorb` updates them after training, `step` replaces the
   server's linear rule, and `evaluated` the model that is evaluated and saved.
3. *Code.* `local_loss` is any other local objective, differentiated by autograd; slower, for clients one by one.

Beside these, `judge` keeps some of the clients that trained, `groups` gives clusters of clients a model each, and
`second_stage` trains a new last layer on those models.
Buffers such as BatchNorm statistics are always averaged by `Round.shares`, whatever an algorithm makes of parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from fedentopt.randomness import generator
from fedentopt.registry import Registry
from fedentopt.settings import Configurable

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fedentopt.algorithms.local_code import Batch, LocalContext
    from fedentopt.selection import Selector

IN_GRADIENT, AFTER_STEP = "gradient", "after"
"""Where a push enters: into the gradient, so that it passes through momentum, or into the weights after each step."""


@dataclass(frozen=True)
class Client:
    """A client that is about to train: its number, and how many samples of each class it trains on, (C,)."""

    number: int
    label_counts: np.ndarray


@dataclass(frozen=True)
class LocalTerms:
    """Numbers of one client's local objective. None stands for a scale of one, a shift of zero."""

    mu: float = 0.0
    logit_scale: np.ndarray | None = None
    logit_shift: np.ndarray | None = None


@dataclass(frozen=True)
class Round:
    """What the server knows of a round when it combines: one entry per client whose model takes part.

    `shares` are the clients' parts p_k of the samples (or the selector's weights, where it gives some), sum 1;
    `steps` their numbers of local SGD steps; `label_counts` (M, C) as the server reads them: through noise, where there
    is any. `lr` and `momentum` are those the clients trained with, `total_clients` is K. `tensor(array)` puts numbers
    where the models are, without making the host wait for the device. `losses` (M,) are those of the model each client
    started from, on the samples it trains on, where the algorithm `reads_losses`; `seed` is the run's.
    """

    number: int
    clients: tuple[int, ...]
    shares: np.ndarray
    steps: np.ndarray
    label_counts: np.ndarray
    lr: float
    momentum: float
    total_clients: int
    tensor: Callable[[np.ndarray], Tensor]
    losses: np.ndarray | None = None
    seed: int = 0

    def rng(self, *numbers: int) -> np.random.Generator:
        """A generator for the server's draws: a function of seed, round and `numbers`, of nothing drawn before."""
        return generator(self.seed, "server", self.number, *numbers)


@dataclass(frozen=True)
class Mixing:
    """Factors of the next global model: on the old one and on each trained client model."""

    own: float
    clients: np.ndarray


@dataclass
class Vectors:
    """An algorithm's vectors, by name: `server` (P,), `client` (M, P), one row for each client that trained.

    P is the number of parameters as they lie in a flat row. What is assigned here is kept.
    """

    server: dict[str, Tensor] = field(default_factory=dict)
    client: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelSizes:
    """What a second stage is budgeted by: parameters of the model and of its encoder (everything but the last linear
    layer), numbers of features that enter that layer and of classes."""

    parameters: int
    encoder: int
    features: int
    classes: int


@dataclass(frozen=True)
class SecondStage:
    """A stage in which the groups' encoders are frozen and one new linear layer is trained on all their features:
    rounds before it, rounds of it, and mini-batches of a client in each."""

    first: int
    rounds: int
    local_batches: int


class Algorithm(Configurable):
    """FedAvg, and the base of the others: overrides say only what differs.

    McMahan et al., "Communication-efficient learning of deep networks from decentralized data", AISTATS 2017:
    w <- sum_k p_k w_k with p_k the client's share of the samples trained on.
    Settings are declared in the class body: `mu: float = setting(1e-4, help="...", low=0)`.
    """

    name: ClassVar[str] = "algorithm"
    label: ClassVar[str] = "Algorithm"
    reads_label_counts: ClassVar[bool] = False
    """Whether the server half needs the clients' label counts (`Round.label_counts`, `groups`)."""
    reads_losses: ClassVar[bool] = False
    """Whether every client of a round tells, before it trains, the loss of the model it starts from (`Round.losses`):
    plain cross-entropy, without augmentation, in evaluation mode."""
    server_vectors: ClassVar[tuple[str, ...]] = ()
    client_vectors: ClassVar[tuple[str, ...]] = ()
    sends_down: ClassVar[tuple[str, ...]] = ()
    """Server vectors that travel to every client of a round; counted like a model."""
    sends_up: ClassVar[tuple[str, ...]] = ()
    """Client vectors whose change every client sends back; counted like a model."""
    keeps_models: ClassVar[bool] = False
    """Whether every client's last trained model is kept for `LocalContext.previous`."""
    own_selector: ClassVar[type[Selector] | None] = None
    """The selector that an algorithm brings because its draw is part of the method."""

    # --- data
    def local_terms(self, client: Client) -> LocalTerms:
        """The local objective of a client."""
        return LocalTerms()

    def mix(self, round: Round) -> Mixing:
        """Server factors. With a `step`, `Mixing.clients` are the shares it gets, and `own` must be 0."""
        return Mixing(0.0, round.shares)

    # --- state
    def initial(self, vector: str) -> float:
        """What every entry of a server or client vector is before round 1."""
        return 0.0

    @property
    def vectors_start_as_network(self) -> bool:
        """Whether all vectors start as the parameters of one freshly drawn network, in place of `initial`."""
        return False

    @property
    def push_enters(self) -> str:
        """Where `push` enters, `IN_GRADIENT` or `AFTER_STEP`."""
        return IN_GRADIENT

    def push(self, vectors: Vectors) -> Tensor:
        """A linear term <push_k, w> of each client's local objective: (M, P), or (P,), the same for all."""
        raise NotImplementedError

    def absorb(self, vectors: Vectors, start: Tensor, trained: Tensor, round: Round) -> None:
        """Update the vectors from the way each client went, from `start` (P,) to `trained` (M, P)."""

    def step(self, server: dict[str, Tensor], start: Tensor, trained: Tensor, shares: Tensor) -> Tensor:
        """The next global parameters (P,) from the last ones and the clients' (M, P); `server` vectors may be set.

        One that has a further parameter `round` is given the `Round` by that name.
        """
        raise NotImplementedError

    def evaluated(self, server: dict[str, Tensor], model: Tensor) -> Tensor:
        """The parameters (P,) that are evaluated and saved, where they are others than those that go on."""
        return model

    # --- code
    def local_loss(self, model: nn.Module, start: nn.Module, batch: Batch, context: LocalContext) -> Tensor:
        """The loss of one batch, a scalar, for a local objective that `local_terms` cannot say."""
        raise NotImplementedError

    # --- the rest
    def judge(self, soft_labels: np.ndarray, samples: np.ndarray) -> np.ndarray:
        """Which of the clients that trained are kept, as indices; from their mean softmax over their own data (M, C)
        and numbers of samples (M,)."""
        raise NotImplementedError

    def groups(self, label_counts: np.ndarray, seed: int) -> np.ndarray | None:
        """The group (0, 1, ...) of every client, each group with a global model of its own; None for one model."""
        return None

    def second_stage(self, rounds: int, cohort: int, clients: int, sizes: ModelSizes) -> SecondStage | None:
        """How a budget of `rounds` rounds is divided where a second stage follows; None for one stage."""
        return None


HOOKS = tuple(name for name in vars(Algorithm) if not name.startswith("_") and name not in ("name", "label"))
"""What an algorithm may have of its own."""


def overrides(algorithm: Algorithm, hook: str) -> bool:
    """Whether the algorithm has a hook of its own."""
    return getattr(type(algorithm), hook) is not getattr(Algorithm, hook)


def effective_steps(steps: np.ndarray, momentum: float) -> np.ndarray:
    """FedNova's a_k: how far `steps` SGD steps with momentum carry, in units of one plain step.

    a = [t - rho (1 - rho^t) / (1 - rho)] / (1 - rho); without momentum it is t itself.
    """
    t = np.asarray(steps, dtype=np.float64)
    return (t - momentum * (1 - momentum**t) / (1 - momentum)) / (1 - momentum)


ALGORITHMS: Registry[Algorithm] = Registry("algorithm")
algorithm = ALGORITHMS.register
