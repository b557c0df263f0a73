"""Messages to many nodes, so many of them at a time: the next ones are sent while the slow ones are still awaited.

Replies are handed on in batches, so that they can be held against each other. No more nodes than the window is wide are
ever asked and not yet handed on, so no more of their models are held. A node that says nothing stands in the window
until it has had its time; the first that does so has the whole of it, and from then on others have ten times the usual.
So a few that are silent cost one timeout in all, and many little more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median

from flwr.app import Message
from flwr.serverapp import Grid

from fedentopt.flower.exchange import Answer, Clock, pause_after, pull, push

MOST_TIME = 10.0


class Window:
    """Asks nodes, at most `width` at a time, and waits for each at most `timeout` seconds.

    After `patience` seconds without an answer the next ones are asked in the place of those that have come, where these
    are half of the ones asked last.
    """

    def __init__(self, grid: Grid, width: int, timeout: float, patience: float, clock: Clock) -> None:
        self.grid, self.width, self.timeout, self.patience, self.clock = grid, width, timeout, patience, clock
        self._took: list[float] = []  # seconds that replies took
        self._given_up = False
        self._waiting: dict[str, tuple[Message, float]] = {}

    def ask(
        self,
        nodes: Sequence[int],
        messages: Callable[[Sequence[int]], Iterable[Message]],
        take: Callable[[Sequence[Answer]], None],
    ) -> None:
        """Send the `messages` for these nodes, and have their answers taken, each batch in the order of the nodes."""
        place = {node: number for number, node in enumerate(nodes)}
        left = list(nodes)
        while left or self._waiting:
            room = self.width - len(self._waiting)
            fresh, left = left[:room], left[room:]
            sent = list(messages(fresh)) if fresh else []
            out = push(self.grid, sent)
            now = self.clock.now()
            self._waiting |= {name: (message, now) for name, message in out.items()}
            gone = {id(message) for message in out.values()}
            unsent = [Answer(message, None, self.timeout) for message in sent if id(message) not in gone]
            take(sorted(unsent + self._collect(set(out), bool(left)), key=lambda answer: place[answer.node_id]))

    def _collect(self, fresh: set[str], more: bool) -> list[Answer]:
        """What comes until others may be asked, or where there are no more, until nobody is waited for."""
        answers: list[Answer] = []
        begin = last = self.clock.now()
        while True:
            came = pull(self.grid, {name: message for name, (message, _) in self._waiting.items()})
            now, longest = self.clock.now(), self._longest()
            for name, (message, asked) in list(self._waiting.items()):
                reply, seconds = came.get(name), now - asked
                if reply is None:
                    if seconds < longest:
                        continue
                    self._given_up = True
                    answers.append(Answer(message, None, longest))
                elif isinstance(reply, str):
                    answers.append(Answer(message, None, longest, seconds, problem=reply))
                else:
                    answers.append(Answer(message, reply, longest, seconds))
                    self._took += [] if reply.has_error() else [seconds]
                del self._waiting[name]
            last = now if came else last
            silent = len(fresh & self._waiting.keys())
            enough = not silent or (2 * silent <= len(fresh) and now - last >= self.patience)
            if not self._waiting or (more and answers and enough):
                return answers
            self.clock.sleep(pause_after(now - begin))

    def _longest(self) -> float:
        """How long a node is waited for."""
        if not self._given_up or not self._took:
            return self.timeout
        return min(self.timeout, max(self.patience, MOST_TIME * median(self._took)))
