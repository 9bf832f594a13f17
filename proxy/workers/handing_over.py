"""Have the workers of a machine follow another map: those who lose clients first."""

import asyncio
from collections.abc import Sequence
from typing import Any

from structlog import get_logger

from proxy.members.slot_map import SlotMap
from proxy.workers.control_channel import ChannelLostError
from proxy.workers.key_rules import KeyRules
from proxy.workers.post import Post, WorkerError, call_all
from proxy.workers.shared_keys import debt_row

HAND_OVER_LIMIT_S = 30.0
"""For workers to let clients go, and then to take them up; each step."""

DebtRows = list[list[Any]]
"""Debts, as `debt_row` makes them."""

_log = get_logger(__name__)


async def let_go(posts: Sequence[Post], slot_map: SlotMap, keys: KeyRules) -> DebtRows:
    """Have all workers let go what they do not own any more; return what its clients owe.

    What those owed that a worker had which is gone now is known by what it has told. One that does
    not let go is ended: others own its clients and write its records from now on.
    """
    what = {"slot_map": slot_map.document(), "keys": keys.text()}
    calls = (post.call("let_go", HAND_OVER_LIMIT_S, **what) for post in posts)
    owed: DebtRows = []
    for post, result in zip(
        posts, await asyncio.gather(*calls, return_exceptions=True), strict=True
    ):
        if isinstance(result, list):
            owed += result
        elif isinstance(result, ChannelLostError | WorkerError):
            owed += map(debt_row, post.debts.left())
            if isinstance(result, WorkerError):
                text = "a worker that lets nothing go is ended"
                _log.error(text, worker=post.number, error=str(result))
                post.kill()
        elif isinstance(result, BaseException):
            raise result
    return owed


async def take_up(posts: Sequence[Post], owed: DebtRows, shown: SlotMap | None = None) -> None:
    """Have all workers take up what they own by the map that they were given last.

    `shown` is the map by which clients are sent on, where that is another one.
    """
    document = None if shown is None else shown.document()
    try:
        await call_all(posts, "take_up", HAND_OVER_LIMIT_S, owed=owed, shown=document)
    except WorkerError as error:
        _log.error("a worker does not take up what it owns", error=str(error))
