"""Keeps the workers of a machine alive: ends those that hang, and starts again what has ended."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence

from structlog import get_logger

from metrics import MemberInstruments
from proxy.workers.control_channel import ChannelLostError
from proxy.workers.machine_ports import MachinePorts
from proxy.workers.post import Post, WorkerError, looping

PING_INTERVAL_S, PING_LIMIT_S = 2.0, 10.0
"""A worker whose event loop stands for so long hangs, and is killed."""

SETTLED_INTERVAL_S = 1.0
"""Between two looks whether workers have come out of a crash loop."""

_log = get_logger(__name__)


class Upkeep:
    """Of all workers. `serve_again` starts one that has ended, `changed` is called in crash loops.

    `serve_again` raises WorkerError, ChannelLostError for one that cannot begin; all else that it
    raises ends the machine.
    """

    def __init__(
        self,
        posts: Sequence[Post],
        ports: MachinePorts,
        metrics: MemberInstruments,
        serve_again: Callable[[Post], Coroutine[None, None, None]],
        changed: Callable[[], None],
    ) -> None:
        self._posts, self._ports, self._metrics = posts, ports, metrics
        self._serve_again, self._changed = serve_again, changed
        metrics.workers_crash_looping.set_function(lambda: len(looping(posts)))

    def works(self) -> Iterator[Coroutine[None, None, None]]:
        """Return what is to run while workers serve; none of it ends by itself."""
        yield self._watch_settled()
        yield from map(self._keep, self._posts)
        yield from map(self._ping, self._posts)

    async def _keep(self, post: Post) -> None:
        """Start a worker again whenever it has ended, until cancelled."""
        while True:
            await post.ended.wait()
            self._ports.hold(post.number, post.found)
            was_looping = post.restarts.is_looping
            delay_s = post.restarts.crashed(time.monotonic())
            self._metrics.worker_restarts_total.labels(str(post.number)).inc()
            _log.error("a worker has ended, starting it again", worker=post.number, in_s=delay_s)
            if post.restarts.is_looping and not was_looping:
                text = "a worker crashes again and again: others have its clients meanwhile"
                _log.error(text, worker=post.number, fix="see above what it died of")
                self._changed()
            await asyncio.sleep(delay_s)
            try:
                await self._serve_again(post)
            except (WorkerError, ChannelLostError) as error:
                _log.error("a worker could not begin", worker=post.number, error=str(error))
                post.kill()

    async def _ping(self, post: Post) -> None:
        """Kill a worker that hangs, until cancelled."""
        while True:
            await asyncio.sleep(PING_INTERVAL_S)
            if post.serves:
                try:
                    await post.call("ping", PING_LIMIT_S)
                except WorkerError as error:
                    _log.error("a worker hangs and is killed", worker=post.number, error=str(error))
                    post.kill()
                except ChannelLostError:
                    post.kill()

    async def _watch_settled(self) -> None:
        """Give workers their slots again that have come out of a crash loop, until cancelled."""
        while True:
            await asyncio.sleep(SETTLED_INTERVAL_S)
            now_s = time.monotonic()
            settled = [
                post.number
                for post in self._posts
                if post.serves and post.restarts.has_settled(now_s)
            ]
            if settled:
                _log.info("workers have settled: their clients come back", workers=settled)
                self._changed()
