"""Answers that an interceptor has given in the place of the broker: the client gets each in turn.

Such a request waits among those in flight like any other, so that the client gets its responses in
the order of its requests. Its turn comes when it is the oldest and no response is under way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.relay.connection import Connection


def is_own_answer_next(conn: Connection) -> bool:
    """Return whether the oldest request in flight is one that the broker has not got."""
    if not (conn.own_answers and conn.in_flight):
        return False
    seen = conn.in_flight[0].seen
    return seen is not None and seen.answer is not None


def send_own_answer(conn: Connection, send: Callable[[bytes], None]) -> bool:
    """Send the answer to the oldest request in flight if it is the interceptor's own.

    Return whether it was. One for each call: `send` may keep a part that is to be sent first.
    """
    if not is_own_answer_next(conn):
        return False
    exchange = conn.in_flight.popleft()
    conn.own_answers -= 1
    assert exchange.seen is not None
    answer = exchange.seen.answer
    assert answer is not None
    send(answer)
    exchange.session.count_bytes(exchange.api_key, exchange.request_bytes + len(answer))
    conn.answered()
    return True
