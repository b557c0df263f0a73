"""Models: plain `torch.nn.Module`s, nothing federated inside.

`build` makes one by name, from a seed, on the CPU; `check_name` tells whether there is one; `head_name` where its last
linear layer is; `keeps_order` whether it needs images in plain order; `check_pretrained` whether its published weights
are there; `dropout_key` gives the handle by which a trainer keys the dropout masks of a step, `keyed_draws` what keys
other draws; `host_reads` tells whether Python looks at numbers of a step.
"""

from __future__ import annotations

from fedentopt.models.building import NAMES, build, check_name
from fedentopt.models.head import find_head, head_name
from fedentopt.models.host_reads import host_reads
from fedentopt.models.keyed_draws import keyed_draws
from fedentopt.models.keyed_dropout import DropoutKey, dropout_key
from fedentopt.models.memory_order import keeps_order
from fedentopt.models.pretrained import PRETRAINED, check_pretrained

__all__ = [
    "NAMES",
    "PRETRAINED",
    "DropoutKey",
    "build",
    "check_name",
    "check_pretrained",
    "dropout_key",
    "find_head",
    "head_name",
    "host_reads",
    "keeps_order",
    "keyed_draws",
]
