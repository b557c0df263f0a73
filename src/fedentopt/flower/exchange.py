"""Messages out, replies in, each reply beside the message it answers.

Flower returns replies in the order they arrive, and the error that stands for a dead node comes from the
SuperLink, not from the node. Replies are therefore matched by the id of the message they answer and handed on in
the order of the messages, which also makes sums over them independent of who was fastest.

Messages are pushed once and their replies pulled with growing pauses, rather than by `Grid.send_and_receive`: so each
reply has the time at which it came, a reply that Flower itself cannot read is one client's failure and not the end of
the run, and questions may stay open while others are asked (`census`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flwr.app import Error, Message
from flwr.serverapp import Grid

from fedentopt.server.report import printable

UNUSABLE = 701  # error code that stands for a reply whose content cannot be used; Flower's own are below 100
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 3.0

log = logging.getLogger("flwr")


class Clock:
    """Time as the server waits it."""

    def now(self) -> float:
        """Seconds since some moment."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Let so many seconds pass."""
        time.sleep(seconds)


@dataclass(frozen=True)
class Answer:
    """One message and what came back: a reply, an error, or nothing before the time was up.

    `seconds` is how long the reply took, `problem` what is wrong with its content.
    """

    message: Message
    reply: Message | None
    waited: float
    seconds: float | None = None
    problem: str | None = None

    @property
    def node_id(self) -> int:
        """The node that was asked, whoever sent the reply."""
        return self.message.metadata.dst_node_id

    @property
    def is_silence(self) -> bool:
        """Whether nothing came before the time was up."""
        return self.reply is None and self.problem is None

    @property
    def failure(self) -> str | None:
        """Why there is nothing to use, or None when the reply carries content that can be used."""
        if self.problem is not None:
            return self.problem
        if self.reply is None:
            return f"no answer within {self.waited:g} s"
        if self.reply.has_error():
            error = self.reply.error
            return f"error {error.code}: {printable(error.reason or 'no reason given')}"
        return None


def push(grid: Grid, messages: Iterable[Message]) -> dict[str, Message]:
    """Send the messages; returns those that went out by their ids."""
    sent = list(messages)  # deployment grids read the messages twice, so a generator would send nothing
    if not sent:
        return {}
    names = list(grid.push_messages(sent))
    if len(names) != len(sent):  # a grid that leaves out what it could not send
        return {message.metadata.message_id: message for message in sent if message.metadata.message_id in set(names)}
    return {name: message for name, message in zip(names, sent, strict=True) if name}


def pull(grid: Grid, waiting: Mapping[str, Message]) -> dict[str, Message | str]:
    """Replies that have come, by the id of the message they answer; a text where one cannot be read.

    A second reply to a message and a reply to none of these are dropped.
    """
    found: dict[str, Message | str] = {}
    try:
        replies = list(grid.pull_messages(list(waiting)))
    except Exception as error:
        replies = []
        found = _pull_one_by_one(grid, waiting, error)
    by_node = {message.metadata.dst_node_id: name for name, message in waiting.items()}
    for reply in replies:
        # A grid that numbers no messages can only be matched by sender.
        name = reply.metadata.reply_to_message_id or by_node.get(reply.metadata.src_node_id, "")
        if name in waiting:
            found.setdefault(name, reply)
    return found


def _pull_one_by_one(grid: Grid, waiting: Mapping[str, Message], error: Exception) -> dict[str, Message | str]:
    """Find the replies that Flower cannot read; where it is the grid that fails, that is raised again."""
    list(grid.get_node_ids())  # raises where nothing can be reached
    log.warning("a reply cannot be read (%s); looking for it", printable(error))
    found: dict[str, Message | str] = {}
    for name in waiting:
        try:
            for reply in grid.pull_messages([name]):
                found.setdefault(name, reply)
        except Exception as unreadable:
            found[name] = f"its reply cannot be read ({printable(unreadable)})"
    return found


def exchange(grid: Grid, messages: Iterable[Message], timeout: float, clock: Clock | None = None) -> list[Answer]:
    """Send the messages, wait at most `timeout` seconds, and return one answer per message, in their order."""
    clock = clock or Clock()
    sent = list(messages)
    begin = clock.now()
    waiting = push(grid, sent)
    came: dict[int, tuple[Message | str, float]] = {}
    while waiting:
        for name, reply in pull(grid, waiting).items():
            came[id(waiting.pop(name))] = (reply, clock.now() - begin)
        left = timeout - (clock.now() - begin)
        if not waiting or left <= 0:
            break
        clock.sleep(min(pause_after(clock.now() - begin), left))
    answers = []
    for message in sent:
        got, seconds = came.get(id(message), (None, None))
        if isinstance(got, str):
            answers.append(Answer(message, None, timeout, seconds, problem=got))
        else:
            answers.append(Answer(message, got, timeout, seconds))
    return answers


def pause_after(waited: float) -> float:
    """How long to wait before looking again: a tenth of what has been waited, within limits."""
    return min(max(_FIRST_PAUSE, waited / 10), _LONGEST_PAUSE)


def replies(answers: Iterable[Answer]) -> list[Message]:
    """The replies that came, as Flower's aggregation takes them: an error in the place of one that cannot be used.

    Flower writes the text of every error to the log as it is, so a node's own is replaced too.
    """
    given = []
    for answer in answers:
        reply = answer.reply
        if answer.problem is None and reply is None:
            continue
        if answer.failure is not None or reply is None:
            code = reply.error.code if reply is not None and reply.has_error() else UNUSABLE
            reply = Message(Error(code=code, reason=answer.failure), reply_to=answer.message)
        given.append(reply)
    return given
