"""Recipes: a whole NVFlare job with label-aware cohorts, for the simulator, a proof of concept or production.

    recipe = NumpyFedEntOptRecipe(
        cohort_size=4, buffer_size=8, num_classes=10, labels="client:labels",
        min_clients=2, num_rounds=50, model=[0.0] * 10, train_script="client.py")
    recipe.execute(SimEnv(num_clients=16))

`LabelAwareRecipe` goes before any recipe that descends from NVFlare's `FedAvgRecipe`; for PyTorch:

    from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
    class TorchRecipe(LabelAwareRecipe, FedAvgRecipe): ...

NVFlare's recipes take `min_clients` both for the sites a job needs and for the sites a round trains. Here the second is
`cohort_size`, and the job goes on for as long as `min_clients` sites are alive.
"""

from __future__ import annotations

from typing import Any

from nvflare.app_common.np.recipes.fedavg import NumpyFedAvgRecipe
from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.job_config.defs import FilterType
from nvflare.recipe.fedavg import FedAvgRecipe

from fedentopt.errors import InputError
from fedentopt.nvflare.controller import LabelAware, LabelAwareFedAvg, LabelAwareScaffold
from fedentopt.nvflare.report import TASK
from fedentopt.nvflare.site import ExampleWeight, LabelCounts
from fedentopt.own_code import is_import_path

SELECTION = (
    "buffer_size",
    "seed",
    "target",
    "selector",
    "selector_args",
    "size_cap",
    "exclude",
    "query_timeout",
    "train_timeout",
    "node_timeout",
    "state",
    "head",
    "local",
    "loss_metric",
)
"""Options that go to the controller, `LabelAware`."""

NOT_WITH_SCAFFOLD = ("aggregator", "stop_cond", "patience", "exclude_vars", "aggregation_weights")


class LabelAwareRecipe:
    """Mixin: label-aware cohorts for a recipe of the FedAvg kind.

    cohort_size, num_classes, and the names of `SELECTION`: see `LabelAware`
    labels     what each site counts where its owner's file does not say: "module:function", a module of the job
    scaffold   NVFlare's SCAFFOLD in the place of FedAvg; the training script sends control terms then
    kwargs     everything else goes to the recipe
    """

    def __init__(
        self, *, cohort_size: int, num_classes: int, labels: str | None = None, scaffold: bool = False, **kwargs: Any
    ) -> None:
        self._selection = {name: kwargs.pop(name) for name in SELECTION if name in kwargs}
        self._selection |= {"cohort_size": cohort_size, "num_classes": num_classes}
        if labels is not None and not (isinstance(labels, str) and is_import_path(labels)):
            raise InputError(f"labels: {labels!r} is not accepted; accepted: module:function, as in 'data:labels'")
        self._labels, self._num_classes, self._scaffold = labels, num_classes, scaffold
        if scaffold:
            for name in NOT_WITH_SCAFFOLD:
                if kwargs.get(name) is not None:
                    raise InputError(f"{name}: {kwargs[name]!r} goes with FedAvg only; accepted with scaffold: none")
        super().__init__(**kwargs)

    def _create_controller(self, persistor_id: str, model_params: Any, model_aggregator: Any) -> LabelAware:
        controller: FedAvg = super()._create_controller(persistor_id, model_params, model_aggregator)  # type: ignore[misc]
        shared = {
            "num_rounds": controller.num_rounds,
            "persistor_id": persistor_id,
            "memory_gc_rounds": controller.memory_gc_rounds,
            "enable_tensor_disk_offload": controller.enable_tensor_disk_offload,
        }
        if self._scaffold:
            return LabelAwareScaffold(**shared, **self._selection)
        return LabelAwareFedAvg(
            **shared,
            model=controller.model,
            save_filename=controller.save_filename,
            aggregator=controller.aggregator,
            stop_cond=controller.stop_cond,
            patience=controller.patience,
            task_name=controller.task_name,
            exclude_vars=controller.exclude_vars,
            aggregation_weights=controller.aggregation_weights,
            fedprox_mu=controller.fedprox_mu,
            **self._selection,
        )

    def _prepare_client_apps(self) -> None:
        super()._prepare_client_apps()  # type: ignore[misc]
        job = self._job  # type: ignore[attr-defined]
        # fedentopt is installed at the sites; without this line NVFlare would send parts of it along with the job.
        job.set_app_packages([*job.job.app_packages, "fedentopt"])
        for site in self.per_site_config or [None]:  # type: ignore[attr-defined]
            classes = None if self._labels is None else self._num_classes
            counts, weight = LabelCounts(self._labels, classes), ExampleWeight(self._labels, classes)
            if site is None:
                job.to_clients(counts, tasks=[TASK])
                job.to_clients(weight, filter_type=FilterType.TASK_RESULT, tasks=["train"])
            else:
                job.to(counts, site, tasks=[TASK])
                job.to(weight, site, filter_type=FilterType.TASK_RESULT, tasks=["train"])


class FedEntOptRecipe(LabelAwareRecipe, FedAvgRecipe):
    """NVFlare's unified `FedAvgRecipe` with label-aware cohorts: any framework, by `framework=`."""


class NumpyFedEntOptRecipe(LabelAwareRecipe, NumpyFedAvgRecipe):
    """NVFlare's `NumpyFedAvgRecipe` with label-aware cohorts."""
