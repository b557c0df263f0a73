"""Messages out, replies in, each reply beside the message it answers.

Flower returns replies in the order they arrive, and the error that stands for a dead node comes from the
SuperLink, not from the node. Replies are therefore matched by the id of the message they answer and handed on in
the order of the messages, which also makes sums over them independent of who was fastest.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from flwr.app import Message
from flwr.serverapp import Grid

LONGEST_REASON = 500  # characters of a node's error text that reach the log


@dataclass(frozen=True)
class Answer:
    """One message and what came back: a reply, an error, or nothing before the time was up."""

    message: Message
    reply: Message | None
    waited: float

    @property
    def node_id(self) -> int:
        """The node that was asked, whoever sent the reply."""
        return self.message.metadata.dst_node_id

    @property
    def failure(self) -> str | None:
        """Why there is nothing to use, or None when the reply carries content."""
        if self.reply is None:
            return f"no answer within {self.waited:g} s"
        if self.reply.has_error():
            error = self.reply.error
            return f"error {error.code}: {(error.reason or 'no reason given')[:LONGEST_REASON]}"
        return None


def exchange(grid: Grid, messages: Iterable[Message], timeout: float) -> list[Answer]:
    """Send the messages, wait at most `timeout` seconds, and return one answer a message, in their order.

    A second reply to the same message and a reply to no message of these are dropped.
    """
    sent = list(messages)  # deployment grids read the messages twice, so a generator would send nothing
    if not sent:
        return []
    by_message: dict[str, Message] = {}
    by_node: dict[int, Message] = {}
    for reply in grid.send_and_receive(sent, timeout=timeout):
        answered = reply.metadata.reply_to_message_id
        if answered:
            by_message.setdefault(answered, reply)
        else:  # a grid that numbers no messages can only be matched by sender
            by_node.setdefault(reply.metadata.src_node_id, reply)
    return [
        Answer(
            message=message,
            reply=by_message.get(message.metadata.message_id) or by_node.get(message.metadata.dst_node_id),
            waited=timeout,
        )
        for message in sent
    ]


def replies(answers: Iterable[Answer]) -> list[Message]:
    """The replies that came, errors among them, as Flower's aggregation takes them."""
    return [answer.reply for answer in answers if answer.reply is not None]
