"""Label-aware selection inside NVIDIA FLARE: controllers and recipes for the job, an executor for the sites.

    from fedentopt.nvflare import NumpyFedEntOptRecipe                        # a whole job, or
    from fedentopt.nvflare import LabelAware, LabelAwareFedAvg, LabelAwareScaffold, LabelCounts   # its parts

Needs the extra: pip install "fedentopt[nvflare]".
"""

from __future__ import annotations

try:
    import nvflare as _nvflare  # noqa: F401
except ImportError as error:
    raise ImportError("fedentopt.nvflare needs NVFlare; install it with: pip install 'fedentopt[nvflare]'") from error

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
