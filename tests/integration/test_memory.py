"""What a throttled client has asked for waits in the broker, not in the proxy."""

from collections.abc import Callable
from contextlib import ExitStack

import psutil
import pytest
from support.proxy_process import ProxyProcess, until
from support.raw import RawClient, api_versions, fetch

CONNECTIONS = 100
RESPONSE_BYTES = 1 << 20
BOUND_BYTES = 1 << 20
GROWTH_BYTES = 10 << 20


@pytest.mark.slow
def test_throttled_responses_are_not_held_in_memory(
    proxy: Callable[..., ProxyProcess],
    topic: Callable[..., str],
    fill: Callable[..., None],
    data_path: tuple[str, ...],
) -> None:
    """A hundred megabytes are asked for; all but the first few seconds' worth wait."""
    rules = [{"client-id": "many", "scope": "shared", "consumer_byte_rate": BOUND_BYTES}]
    running = proxy(*data_path, anew=True, rules=rules)
    name = topic(config={"max.message.bytes": str(2 * RESPONSE_BYTES)})
    fill(name, 2, RESPONSE_BYTES - 1000)
    with ExitStack() as stack:
        clients = [
            stack.enter_context(RawClient(running.bootstrap, "many")) for _ in range(CONNECTIONS)
        ]
        for client in clients:
            client.ask(api_versions(3))
        process = psutil.Process(running.pid)
        before = process.memory_info().rss
        for client in clients:
            client.send(fetch(12, name, max_bytes=RESPONSE_BYTES))
        until(lambda: running.metrics().value("delay_queue_size", api="fetch"), "they are held")
        assert process.memory_info().rss - before < GROWTH_BYTES
