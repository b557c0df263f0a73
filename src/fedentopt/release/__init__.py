"""How a client's label counts leave it: with noise, drawn once, within a budget that the client's owner sets.

    owner = OwnerSettings(epsilon=0.5, file=Path("/var/lib/fl/report.json"), release=1, total=1.0)
    draw = release_counts(lambda: counts, owner, name="oslo")       # the same answer for ever; draw.counts may leave
    weight = example_weight(owner, samples, draw)                   # what may stand for the number of samples

No federated learning framework is imported here; the adapters (`fedentopt.flower`, ...) read the owner's settings from
where their framework keeps them (`OwnerSettings.read`) and send what comes out. The noise needs OpenDP.
"""

from __future__ import annotations

from fedentopt.release.draws import Draw, draw_counts, release_counts
from fedentopt.release.owner import OwnerSettings, example_weight, read_epsilon

__all__ = ["Draw", "OwnerSettings", "draw_counts", "example_weight", "read_epsilon", "release_counts"]
