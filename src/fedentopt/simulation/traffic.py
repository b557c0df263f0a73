"""What a round sends over the wire, in bytes: models, an algorithm's vectors beside them, what selection asks for."""

from __future__ import annotations

from fedentopt.simulation.head_stage import model_sizes
from fedentopt.simulation.planning import RoundPlan
from fedentopt.simulation.run_state import RunState

LABEL_BYTES = 4  # of one label count or one soft label
LOSS_BYTES = 4
PARAMETER_BYTES = 4


def traffic(run: RunState, plan: RoundPlan, kept: tuple[int, ...]) -> tuple[int, int]:
    """Bytes up and down in a round. A client that dropped out has received its model and sends nothing; one that was
    asked for its loss has received the model too, without the vectors that only training takes. Where an algorithm
    judges clients by their soft labels, these come first, and only the `kept` ones send their models, unless somebody
    learns from those of all. Label reports and a census before training count in round 1."""
    clients, classes, needs = run.config.clients, run.num_classes, run.planner.needs
    sends, gets, only_asked = len(plan.work), len(plan.selected), len({*plan.asked}.difference(plan.selected))
    model = run.layout.model_bytes
    up, down = model * (1 + len(run.algorithm.sends_up)), model * (1 + len(run.algorithm.sends_down))
    extra_down = 0
    if plan.round > run.first_stage:
        sizes = model_sizes(run.model)
        assert sizes is not None
        layer = (len(run.models) * sizes.features + 1) * sizes.classes
        up = down = layer * PARAMETER_BYTES
        if plan.round == run.first_stage + 1:
            encoder = model - (sizes.parameters - sizes.encoder) * PARAMETER_BYTES
            extra_down = clients * len(run.models) * encoder
    senders = sends
    if run.hooks.judges and not run.hooks.absorbs and not needs & {"head", "update"}:
        senders = len(set(plan.trained) & set(kept))
    bytes_up, bytes_down = senders * up, gets * down + only_asked * model + extra_down
    bytes_up += len(plan.asked) * LOSS_BYTES
    if run.algorithm.reads_losses and plan.round <= run.first_stage:
        bytes_up += sends * LOSS_BYTES
    if "loss" in needs:
        bytes_up += sends * 2 * LOSS_BYTES
    if run.hooks.judges:
        bytes_up += sends * classes * LABEL_BYTES
    if plan.round == 1 and run.census_seconds:
        bytes_up += clients * classes * PARAMETER_BYTES
        bytes_down += clients * model
    labels = run.algorithm.reads_label_counts or run.config.audit != "off"
    selector = run.planner.selector
    if plan.round == 1 and (labels or getattr(selector, "reads_label_counts", True)):
        sizes_only = getattr(selector, "sizes_only", False) and not labels
        bytes_up += clients * (1 if sizes_only else classes) * LABEL_BYTES
    return bytes_up, bytes_down
