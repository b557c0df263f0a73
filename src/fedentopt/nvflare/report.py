"""What a site's label report looks like on the wire; the executor writes it, the controller reads it.

A DXO of an app's own kind, so that filters made for model weights leave it alone. Who sent it is told by NVFlare, from
the site's certificate, and not by the report: no site can speak for another.
"""

from __future__ import annotations

from collections.abc import Sequence

from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable

from fedentopt.errors import InputError
from fedentopt.labels import validate_report
from fedentopt.server.report import Report, check_epsilon

TASK = "label_counts"
COUNTS, EPSILON, REFUSED = "label_counts", "epsilon", "refused"


def write_report(counts: Sequence[int] | Sequence[float], epsilon: float | None) -> Shareable:
    """The reply of a site that answers."""
    return DXO(DataKind.APP_DEFINED, data={COUNTS: list(counts), EPSILON: epsilon}).to_shareable()


def write_refusal() -> Shareable:
    """The reply of a site that does not: the same whatever the cause, which stands in the site's log."""
    return DXO(DataKind.APP_DEFINED, data={REFUSED: True}).to_shareable()


def read_report(site: str, reply: Shareable, num_classes: int) -> Report:
    """The report in a reply, checked; a reply that holds none, or nonsense, is refused with the reason."""
    code = reply.get_return_code()
    if code != ReturnCode.OK:
        raise InputError(f"site {site}: {code}")
    try:
        data = from_shareable(reply).data
    except Exception as error:  # what a reply without a DXO trips over is NVFlare's affair
        raise InputError(f"site {site}: the reply holds no label report") from error
    if not isinstance(data, dict) or data.get(REFUSED):
        raise InputError(f"site {site}: refused; its log says why")
    counts, epsilon = data.get(COUNTS), check_epsilon(f"site {site}", data.get(EPSILON))
    if not isinstance(counts, list):
        raise InputError(f"site {site}: label counts must be a list, not {type(counts).__name__}")
    return Report(site, validate_report(site, counts, num_classes, noisy=epsilon is not None), epsilon)
