"""The site's side: an executor that answers the task `label_counts`, and a filter on what training replies tell.

Label counts are a task of their own, so a training script needs no change. What leaves is the answer of
`fedentopt.release`: counts with noise, drawn once and kept, within the owner's budget.

The owner's word is a file of the site's own, `local/fedentopt.json` in the folder of its startup kit. Nothing that a job
or the server sends is read for it:

    {"label-epsilon": 1.0, "label-report-file": "/var/lib/fl/labels.json", "labels": "hospital.data:labels",
     "num-classes": 10}

It holds the settings of `fedentopt.release.owner` and may name what is counted: `labels`, a function without arguments
(`package.module:function`, installed at the site) that returns one class number a sample, and `num-classes`. Where the
file names them, the job's are not used.

A refusal reads the same whatever its cause; the cause stands in the site's log. In NVFlare's simulator sites have no
owner: FEDENTOPT_LABEL_EPSILON of the process stands for `label-epsilon`, and the answer is kept in the site's workspace.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.dxo_filter import DXOFilter
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import FLContextKey, FLMetaKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from fedentopt.errors import InputError
from fedentopt.labels import label_counts
from fedentopt.nvflare.report import write_refusal, write_report
from fedentopt.own_code import find_own
from fedentopt.release import Draw, OwnerSettings, example_weight, release_counts
from fedentopt.release.owner import EPSILON, FILE, LEDGER

OWNER_FILE = "fedentopt.json"
VARIABLE = "FEDENTOPT_LABEL_EPSILON"
LABELS, CLASSES = "labels", "num-classes"


class LabelCounts(Executor):
    """Answers the task `label_counts`. `labels` and `num_classes` are for sites whose owner's file names none."""

    def __init__(self, labels: str | None = None, num_classes: int | None = None) -> None:
        super().__init__()
        self.labels = labels
        self.num_classes = num_classes

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """A report, or a refusal; the task's data are not read."""
        try:
            site = _Site(fl_ctx)
            if site.owner.epsilon is None:
                return write_report(site.count(self.labels, self.num_classes).tolist(), None)
            draw = site.draw(functools.partial(site.count, self.labels, self.num_classes))
            return write_report(list(draw.counts), draw.epsilon)
        except Exception as error:  # its text could quote labels or paths: it stays here
            self.log_exception(fl_ctx, f"label report refused: {error}")
            return write_refusal()


class ExampleWeight(DXOFilter):
    """Result filter of training tasks: puts what the owner allows in the place of the number of steps.

    NVFlare weighs replies by NUM_STEPS_CURRENT_ROUND, which tells the number of a site's samples. By the owner's
    `num-examples` it becomes the total of the noisy counts (the default with noise) or 1, or stays ("exact").
    """

    def __init__(self) -> None:
        kinds = [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF]
        super().__init__(supported_data_kinds=kinds, data_kinds_to_filter=kinds)

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> DXO:
        """The same reply with another weight; 1 where the owner's word or the kept counts cannot be had."""
        try:
            site = _Site(fl_ctx)
            weight = site.owner.weight or ("exact" if site.owner.epsilon is None else "noisy")
            if weight == "exact":
                return dxo
            steps = example_weight(site.owner, 1, site.draw(_none_kept) if weight == "noisy" else None)
        except Exception as error:  # nothing may leave only because something here is wrong
            self.log_warning(fl_ctx, f"the weight of this reply is 1: {error}")
            steps = 1
        dxo.set_meta_prop(FLMetaKey.NUM_STEPS_CURRENT_ROUND, steps)
        return dxo


class _Site:
    """The owner's word at this site, and the counts it speaks of."""

    def __init__(self, fl_ctx: FLContext) -> None:
        self.name = str(fl_ctx.get_identity_name())
        workspace = fl_ctx.get_workspace()
        path = Path(workspace.get_site_config_dir()) / OWNER_FILE
        self.file = _read(path)
        config = dict(self.file)
        if fl_ctx.get_prop(FLContextKey.SIMULATE_MODE, False):
            root = Path(workspace.get_root_dir()).resolve()
            if EPSILON not in config and VARIABLE in os.environ:
                config[EPSILON] = os.environ[VARIABLE]
            config = {FILE: str(root / "label-report.json"), LEDGER: str(root / "label-ledger"), **config}
        self.owner = OwnerSettings.read(config)

    def draw(self, counts: Callable[[], np.ndarray]) -> Draw:
        """The one answer of the owner's release."""
        return release_counts(counts, self.owner, name=self.name)

    def count(self, labels: str | None, num_classes: int | None) -> np.ndarray:
        """The true counts; what is counted comes from the owner's file, whole, or else from the job, whole."""
        if LABELS in self.file or CLASSES in self.file:
            labels, num_classes = self.file.get(LABELS), self.file.get(CLASSES)
        if not isinstance(labels, str) or num_classes is None:
            raise InputError(f"{OWNER_FILE}: {LABELS} and {CLASSES}: both are needed where the job names none")
        return label_counts(np.asarray(find_own(LABELS, labels)()), num_classes)


def _none_kept() -> np.ndarray:
    raise InputError("no label report of this release has been drawn yet")


def _read(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: holds no JSON object")
    return content
