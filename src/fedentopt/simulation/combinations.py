"""What cannot go together in a run: an algorithm, a selector, an audit and a model, each fine by itself.

Settings that contradict each other by their values alone are refused by `RunConfig`; here stands what takes the methods
themselves, the clients' labels or the network to know. Nothing has been written down yet when it is refused.
"""

from __future__ import annotations

from fedentopt.algorithms import Client, LocalTerms
from fedentopt.errors import InputError
from fedentopt.simulation.run_state import RunState


def check_combination(run: RunState, outputs: int | None) -> None:
    """Refuse what cannot be honoured; `outputs` are those of the model's last linear layer, None where none trains."""
    _check_second_stage(run)
    _check_reports(run)
    _check_logits(run)
    _check_last_layer(run, outputs)


def _check_second_stage(run: RunState) -> None:
    config = run.config
    unserved = run.planner.needs & {"candidate_loss", "loss", "head", "update"}
    if run.local_batches is not None and unserved:
        raise InputError(
            f"selector: {config.selector!r} needs {', '.join(sorted(unserved))}, which the second stage of "
            f"{config.algorithm} does not give; accepted: selectors that need label counts or seconds only"
            if config.audit == "off"
            else f"audit: {config.audit} needs last layers, which the second stage of {config.algorithm} "
            f"does not give; accepted: off"
        )


def _check_reports(run: RunState) -> None:
    """Refuse to doubt reports that nobody reads: it would change nothing, and nobody would notice."""
    config, selector = run.config, run.planner.selector
    audit, cap = config.audit, config.size_cap
    name = config.selector if run.algorithm.own_selector is None else config.algorithm
    reads = getattr(selector, "reads_label_counts", True)
    if config.server_images and audit == "off":
        raise InputError(
            f"server_images: {config.server_images} are for the audit, and that is off; "
            f"accepted: 0, or audit: warn, replace, quarantine"
        )
    if cap is not None and not reads:
        raise InputError(
            f"size_cap: {cap:g} changes nothing, since {name!r} selects without reports; "
            f"accepted: none, or a selector that reads label counts"
        )
    if audit != "off" and not reads and run.planner.watch.infers:
        raise InputError(f"audit: {audit} is about label reports, and {name!r} takes none; accepted: off")
    if audit != "replace":
        return
    if not reads or getattr(selector, "sizes_only", False):
        raise InputError(
            f"audit: replace changes nothing, since {name!r} does not select by label counts; "
            f"accepted: off, warn, quarantine, or a selector that reads label counts"
        )
    if not hasattr(selector, "update"):
        raise InputError(
            f"audit: replace needs a selector whose label counts can be changed, and {name!r} has no update; "
            f"accepted: off, warn, quarantine"
        )


def _check_logits(run: RunState) -> None:
    config = run.config
    plain = getattr(run.planner.selector, "needs_plain_logits", False)
    if (run.planner.watch.estimates or plain) and _changes_logits(run):
        what = f"audit: {config.audit}" if config.audit != "off" else f"selector: {config.selector!r}"
        raise InputError(
            f"{what} reads labels from the bias of last layers, which {config.algorithm} changes on purpose "
            f"by shifting or scaling logits; accepted: an algorithm with plain logits"
        )


def _changes_logits(run: RunState) -> bool:
    """Whether the algorithm shifts or scales the logits of any client that can train."""
    for client, counts in enumerate(run.planner.counts):
        terms = run.hooks.local_terms(Client(client, counts)) if counts.any() else LocalTerms()
        if terms.logit_shift is not None or terms.logit_scale is not None:
            return True
    return False


def _check_last_layer(run: RunState, outputs: int | None) -> None:
    config = run.config
    what = f"selector: {config.selector!r} needs"
    if config.audit != "off":
        what = f"audit: {config.audit} needs"
    elif run.planner.forgers:
        what = f"lie: {config.lie} needs"
    elif "head" not in run.planner.needs:
        return
    if outputs is None:
        raise InputError(
            f"{what} the change of the last layer, and the model {config.model!r} has no linear layer that "
            f"trains; accepted: a model that ends in one"
        )
    if (run.planner.watch.estimates or run.planner.forgers) and outputs != run.num_classes:
        raise InputError(
            f"{what} a number per class from the last layer, and that of {config.model!r} has {outputs} "
            f"outputs for {run.num_classes} classes; accepted: a model whose last layer gives the logits"
        )
