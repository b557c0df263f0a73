"""Label-aware selection inside NVIDIA FLARE: recipes and controllers for the job, an executor for the sites.

    from fedentopt.nvflare import FedEntOptRecipe, NumpyFedEntOptRecipe                # a whole job, or its parts:
    from fedentopt.nvflare import LabelAware, LabelAwareFedAvg, LabelAwareScaffold     # at the server
    from fedentopt.nvflare import ExampleWeight, LabelCounts                           # at the sites

Needs the extra: pip install "fedentopt[nvflare]". A name is imported when it is asked for: a site loads no controller.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

try:
    import nvflare as _nvflare  # noqa: F401
except ImportError as error:
    raise ImportError("fedentopt.nvflare needs NVFlare; install it with: pip install 'fedentopt[nvflare]'") from error

if TYPE_CHECKING:
    from fedentopt.nvflare.controller import LabelAware, LabelAwareFedAvg, LabelAwareScaffold, NoClientsError
    from fedentopt.nvflare.recipe import FedEntOptRecipe, LabelAwareRecipe, NumpyFedEntOptRecipe
    from fedentopt.nvflare.site import ExampleWeight, LabelCounts

__all__ = [
    "ExampleWeight",
    "FedEntOptRecipe",
    "LabelAware",
    "LabelAwareFedAvg",
    "LabelAwareRecipe",
    "LabelAwareScaffold",
    "LabelCounts",
    "NoClientsError",
    "NumpyFedEntOptRecipe",
]
_HOMES = {
    "controller": ("LabelAware", "LabelAwareFedAvg", "LabelAwareScaffold", "NoClientsError"),
    "recipe": ("FedEntOptRecipe", "LabelAwareRecipe", "NumpyFedEntOptRecipe"),
    "site": ("ExampleWeight", "LabelCounts"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
