"""The site's side: an executor that answers the task `label_counts`, and a filter on what training replies tell.

Label counts are a task of their own, so a training script needs no change. What leaves is the answer of
`fedentopt.release`: counts with noise, drawn once and kept, within the owner's budget.

The owner's word is a file of the site's own, `local/fedentopt.json` in the folder of its startup kit. Nothing that a
job or the server sends is read for it:

    {"label-epsilon": 1.0, "label-report-file": "/var/lib/fl/labels.json",
     "labels": "hospital.data:labels", "num-classes": 10}

It holds the settings of `fedentopt.release.owner`, and what is counted: `labels`, a function of the site's name
(`package.module:function`, installed at the site) that returns one class number per sample, and `num-classes`. Where
the file names them, the job's are not used; where it does not, the function that a job names must be code that the
job may run here (BYOC, or the site's `class_allow_list`). For privacy per person it names `persons`, a function that
returns whose each sample is, in the same order, and `samples-per-person`. `client-id` tells sites apart that share a
report file.

A refusal reads the same whatever its cause. NVFlare streams a site's logs to the server, so the cause stands in
`label-report.log` in the site's folder, and not in those. In NVFlare's simulator sites have no owner and no secrets:
FEDENTOPT_LABEL_EPSILON of the process stands for `label-epsilon`, and the answer is kept in the site's workspace.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.dxo_filter import DXOFilter
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import FLContextKey, FLMetaKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.widgets.component_path_authorizer import ComponentPathAuthorizer

from fedentopt.errors import InputError
from fedentopt.labels import label_counts
from fedentopt.nvflare.report import write_refusal, write_report
from fedentopt.own_code import find_own, importing_from_here
from fedentopt.privacy import check_sensitivity, clip_persons
from fedentopt.release import Draw, OwnerSettings, example_weight, release_counts
from fedentopt.release.owner import EPSILON, EXAMPLES, FILE, LEDGER, RELEASE, TOTAL

OWNER_FILE = "fedentopt.json"
LOG_FILE = "label-report.log"
VARIABLE = "FEDENTOPT_LABEL_EPSILON"
LABELS, CLASSES, PERSONS, MOST, NAME = "labels", "num-classes", "persons", "samples-per-person", "client-id"
KNOWN = (EPSILON, TOTAL, RELEASE, FILE, LEDGER, EXAMPLES, LABELS, CLASSES, PERSONS, MOST, NAME)


class LabelCounts(Executor):
    """Answers the task `label_counts`. `labels` and `num_classes` are for sites whose owner's file names none."""

    def __init__(self, labels: str | None = None, num_classes: int | None = None) -> None:
        super().__init__()
        self.labels = labels
        self.num_classes = num_classes

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """A report, or a refusal; the task's data are not read."""
        try:
            site = Site(fl_ctx, self.labels, self.num_classes)
            if site.owner.epsilon is None:
                return write_report(site.count().tolist(), None)
            draw = site.draw()
            return write_report(list(draw.counts), draw.epsilon)
        except Exception as error:
            self.log_warning(fl_ctx, f"label report refused; {tell_owner(fl_ctx, error)}")
            return write_refusal()


class ExampleWeight(DXOFilter):
    """Result filter of training tasks: puts what the owner allows in the place of the number of steps.

    NVFlare weighs replies by NUM_STEPS_CURRENT_ROUND, which tells how many samples a site has. By the owner's
    `num-examples` it becomes the total of the noisy counts (the default with noise) or 1, or stays ("exact").
    """

    def __init__(self, labels: str | None = None, num_classes: int | None = None) -> None:
        kinds = [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF, DataKind.METRICS]
        super().__init__(supported_data_kinds=kinds, data_kinds_to_filter=kinds)
        self.labels = labels
        self.num_classes = num_classes

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """As NVFlare's filters; a reply without data, which those leave alone, would tell as much."""
        try:
            dxo = from_shareable(shareable)
        except Exception:  # no DXO and so no weight
            return shareable
        if not dxo.data and dxo.data_kind in self.data_kinds:
            return self.process_dxo(dxo, shareable, fl_ctx).update_shareable(shareable)
        return super().process(shareable, fl_ctx)

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> DXO:
        """The same reply with another weight; 1 where the owner's word or the noisy counts cannot be had."""
        try:
            site = Site(fl_ctx, self.labels, self.num_classes)
            weight = site.owner.weight or ("exact" if site.owner.epsilon is None else "noisy")
            if weight == "exact":
                return dxo
            steps = example_weight(site.owner, 1, site.draw() if weight == "noisy" else None)
        except Exception as error:  # no number of samples leaves because something here is wrong
            self.log_warning(fl_ctx, f"this reply weighs 1; {tell_owner(fl_ctx, error)}")
            steps = 1
        dxo.set_meta_prop(FLMetaKey.NUM_STEPS_CURRENT_ROUND, steps)
        return dxo


class Site:
    """The owner's word at this site, and the counts it speaks of.

    `labels` and `num_classes` are the job's, used together or not at all.
    """

    def __init__(self, fl_ctx: FLContext, labels: str | None, num_classes: int | None) -> None:
        self.name = str(fl_ctx.get_identity_name())
        self._fl_ctx = fl_ctx
        workspace = fl_ctx.get_workspace()
        self._file = _read(Path(workspace.get_site_config_dir()) / OWNER_FILE)
        config = dict(self._file)
        if _simulated(fl_ctx):
            root = Path(workspace.get_root_dir()).resolve()
            if EPSILON not in config and VARIABLE in os.environ:
                config[EPSILON] = os.environ[VARIABLE]
            config = {FILE: str(root / "label-report.json"), LEDGER: str(root / "label-ledger"), **config}
        self.owner = OwnerSettings.read(config)
        if LABELS in self._file or CLASSES in self._file:
            labels, num_classes = self._file.get(LABELS), self._file.get(CLASSES)
        self._labels, self._num_classes = labels, num_classes
        self._most = self._file.get(MOST)
        if (self._most is None) != (PERSONS not in self._file):
            raise InputError(f"{MOST}: needs {PERSONS}, and the other way round; accepted: both or none")
        if self._most is not None:
            check_sensitivity(self._most, MOST)

    def draw(self) -> Draw:
        """The one answer of the owner's release, by the owner's name for the site and never by the server's."""
        place = str(self._file.get(NAME, ""))
        return release_counts(self.count, self.owner, name=place, samples_per_person=self._most)

    def count(self) -> np.ndarray:
        """The true counts, of clipped persons where there are persons."""
        if not isinstance(self._labels, str) or self._num_classes is None:
            raise InputError(f"{OWNER_FILE}: {LABELS} and {CLASSES} are both needed, here or in the job")
        if LABELS not in self._file and not _simulated(self._fl_ctx):
            # An import by name runs code, which NVFlare's own check of a job's components does not see.
            path = {"path": self._labels.replace(":", ".")}
            ComponentPathAuthorizer().authorize_component_config(path, fl_ctx=self._fl_ctx)
        with importing_from_here(last=True):  # the owner's functions may import what lies beside them when called
            labels = np.asarray(find_own(LABELS, self._labels)(self.name))
            if self._most is not None:
                labels = clip_persons(labels, find_own(PERSONS, str(self._file[PERSONS]))(self.name), self._most)
        return label_counts(labels, self._num_classes)


def tell_owner(fl_ctx: FLContext, error: Exception) -> str:
    """Write the cause where only the site's owner reads it; the result says where, and may stand in NVFlare's log."""
    text = "".join(traceback.format_exception(error))
    if _simulated(fl_ctx):
        return text
    path = Path(fl_ctx.get_workspace().get_root_dir()) / LOG_FILE
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a", encoding="utf-8") as log:
            log.write(f"{datetime.now(UTC).isoformat(timespec='seconds')} {text}\n")
    except OSError:
        return f"the cause could not be written to {LOG_FILE} in the site's folder"
    return f"{LOG_FILE} in the site's folder says why"


def _simulated(fl_ctx: FLContext) -> bool:
    """Whether NVFlare's simulator runs this site; the mark is its process's own, no server can send it."""
    return bool(fl_ctx.get_prop(FLContextKey.SIMULATE_MODE, False))


def _read(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: holds no JSON object; accepted: the owner's settings")
    unknown = [name for name in content if name not in KNOWN]
    if unknown:  # a setting that is misspelt must not protect less than its owner believes
        raise InputError(f"{path}: {unknown[0]!r} is no setting; accepted: {', '.join(KNOWN)}")
    return content
