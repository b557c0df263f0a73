"""From Flower's run config to a fedentopt run config."""

from __future__ import annotations

from pathlib import Path

from flwr.app import UserConfig

from fedentopt.errors import InputError
from fedentopt.release import read_epsilon
from fedentopt.simulation.config import RunConfig

LOCAL = ("fedavg", "fedprox", "fedrs", "fedlc")
OTHER_LOGITS = ("fedrs", "fedlc")
"""Those whose clients shift or scale their logits, so that the bias does not tell labels."""
SELECTORS = ("fedentopt", "inferred", "random")
SERVER = {"fedadam": "FedAdam", "fedyogi": "FedYogi", "fedavgm": "FedAvgM"}

# Settings of the app that are none of a fedentopt run.
ELSEWHERE = (
    "class-names",
    "label-epsilon",
    "min-nodes",
    "node-timeout",
    "query-timeout",
    "round-timeout",
    "out",
    "checkpoint",
)


def run_settings(run_config: UserConfig) -> RunConfig:
    """The run this app was started with; what cannot be honoured is refused.

    A server-side optimiser of Flower's is recorded as flwr:FedAdam, a name the simulator does not claim as its own.
    """
    fields = {
        name.replace("-", "_"): value
        for name, value in run_config.items()
        if name not in ELSEWHERE and not name.startswith("fedentopt.")
    }
    algorithm = fields.get("algorithm", "fedavg")
    if algorithm in SERVER:
        fields["algorithm"] = f"flwr:{SERVER[str(algorithm)]}"
    elif algorithm not in LOCAL:
        raise InputError(f"algorithm: {algorithm!r} is not in this app; accepted: {', '.join([*LOCAL, *SERVER])}")
    selector = fields.get("selector")
    if selector not in SELECTORS:
        raise InputError(f"selector: {selector!r} is not in this app; accepted: {', '.join(SELECTORS)}")
    reader = "audit" if fields.get("audit", "off") != "off" else "selector" if selector == "inferred" else None
    if reader is not None and algorithm in OTHER_LOGITS:
        raise InputError(
            f"{reader}: {fields[reader]!r} reads labels from the bias of last layers, which {algorithm} changes on "
            "purpose by shifting or scaling logits; accepted: another algorithm"
        )
    fields["image_size"] = fields.get("image_size") or None
    fields["cohort"] = str(fields.get("cohort"))
    buffer, epochs = fields.pop("buffer", None), fields.pop("census_epochs", None)
    if selector == "fedentopt":
        fields["buffer"] = str(buffer)
    elif selector == "inferred":
        fields["settings"] = {"selector.buffer": str(buffer), "selector.census_epochs": epochs}
    wanted = read_epsilon(run_config.get("label-epsilon"), "run config")  # what simulated nodes use; owners have theirs
    fields["epsilon"] = wanted if isinstance(wanted, float) else None
    return RunConfig.from_dict(fields)


def local_settings(config: RunConfig) -> RunConfig:
    """The same run as a client sees it: a server-side optimiser changes nothing there."""
    return config if config.algorithm in LOCAL else config.replace(algorithm="fedavg")


def folder(run_config: UserConfig, name: str) -> Path | None:
    """A folder setting: None where it is empty; a relative path would land in a process's own directory."""
    text = str(run_config.get(name, ""))
    if not text:
        return None
    if not Path(text).is_absolute():
        raise InputError(f"{name}: {text!r} is not an absolute path")
    return Path(text)


def seconds(run_config: UserConfig, name: str) -> float:
    """A time to wait, which must end."""
    value = run_config[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise InputError(f"{name}: {value!r} is not accepted; accepted: a number of seconds above 0")
    return float(value)


def least_nodes(run_config: UserConfig, clients: int) -> int:
    """How many nodes a round waits for."""
    value = run_config["min-nodes"]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= clients:
        raise InputError(f"min-nodes: {value!r} is not accepted; accepted: 1 to {clients}, or 0 for all of them")
    return value or clients
