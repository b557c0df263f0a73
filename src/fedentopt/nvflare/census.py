"""Asking sites for their label counts: by a task of its own, once, and again after a growing pause where that failed.

What NVFlare's model controllers do with results (events for model selection, errors that end the job) is for models,
so the question is no task of theirs. A site that gave no counts before is waited for `RETRY_SECONDS` at most: it must
not hold up those that do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.fl_context import FLContext

from fedentopt.nvflare.report import TASK, read_report
from fedentopt.server.backoff import Backoff
from fedentopt.server.report import Report, printable

if TYPE_CHECKING:
    from fedentopt.nvflare.controller import LabelAware

RETRY_SECONDS = 10


class Census:
    """Who failed to report, and from when on it is asked again; `timeout` is the longest first wait, in seconds."""

    def __init__(self, num_classes: int, timeout: int) -> None:
        self.num_classes = num_classes
        self.timeout = timeout
        self.pauses = Backoff()

    def ask(self, server: LabelAware, sites: Sequence[str], now: int, *, urgent: bool) -> list[Report]:
        """Ask those of the sites whose pause is over, all of them where it is `urgent`; what is usable, by name."""
        due = [site for site in sites if urgent or self.pauses.over(site, now)]
        first = [site for site in due if not self.pauses.has_failed(site)]
        again = [site for site in due if self.pauses.has_failed(site)]
        found = []
        for group, seconds in ((first, self.timeout), (again, min(self.timeout, RETRY_SECONDS))):
            if group and not server.abort_signal.triggered:
                found += self._query(server, group, seconds, now)
        return sorted(found, key=lambda report: str(report.client))

    def _query(self, server: LabelAware, sites: Sequence[str], seconds: int, now: int) -> list[Report]:
        server.info(f"asking {len(sites)} site(s) for their label counts")
        answers: dict[str, Report | str] = {}

        def received(client_task: ClientTask, fl_ctx: FLContext) -> None:
            site = client_task.client.name
            try:
                answers[site] = read_report(site, client_task.result, self.num_classes)
            except Exception as error:  # an exception here would end the task for all
                answers[site] = printable(error)
            client_task.result = None

        task = Task(
            name=TASK,
            data=DXO(DataKind.APP_DEFINED, data={TASK: True}).to_shareable(),
            timeout=seconds,
            result_received_cb=received,
        )
        server.broadcast_and_wait(
            task=task, targets=list(sites), min_responses=0, fl_ctx=server.fl_ctx, abort_signal=server.abort_signal
        )
        found = []
        for site in sites:
            answer = answers.get(site, f"no answer within {seconds} s")
            if isinstance(answer, Report):
                self.pauses.forget([site])  # it is not asked again
                found.append(answer)
            else:
                until = now + 1 + self.pauses.failed(site, now)
                server.warning(f"site {site} is left out: {answer} (asked again from round {until} on)")
        return found
