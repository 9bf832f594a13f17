"""A bound is raised while a client is at it: that helps at once, and gives no more."""

import time
from collections.abc import Callable

import pytest
from support.operating import call
from support.proxy_process import ProxyProcess
from support.raw import RawClient, fetch

FETCH_VERSION = 12
MB = 1_000_000
BEFORE_S, AFTER_S = 3.0, 4.0
"""Three times as long as the sensors of these tests look back, at least."""
OLD, NEW = 1 * MB, 8 * MB
RECORDS, RECORD_BYTES = 400, 10_000


@pytest.mark.parametrize("path", ["override", "again and again"])
def test_a_raised_bound(
    proxy: Callable[..., ProxyProcess],
    topic: Callable[..., str],
    fill: Callable[..., None],
    path: str,
) -> None:
    name = topic()
    fill(name, RECORDS, RECORD_BYTES)
    process = proxy(rules=[{"client-id": "reads", "consumer_byte_rate": OLD}])
    steps = [NEW] if path == "override" else [2 * MB, 4 * MB, NEW]
    delivered: list[tuple[float, int]] = []
    bounds: list[tuple[float, int]] = []
    with RawClient(process.bootstrap, "reads") as client:

        def read_for(seconds: float) -> None:
            end_s = time.monotonic() + seconds
            while time.monotonic() < end_s:
                client.send(fetch(FETCH_VERSION, name, max_bytes=MB))
                size = len(client.receive_frame())
                client.forget()
                delivered.append((time.monotonic(), size))

        read_for(BEFORE_S)
        for bound in steps:
            bounds.append((time.monotonic(), bound))
            change = {"consumer_byte_rate": bound}
            assert call(process, "PUT", "/v1/quotas/client-id=reads", change).status == 200
            read_for(AFTER_S / len(steps))
    raised_s = bounds[0][0]
    bounds.append((delivered[-1][0], 0))
    largest = max(size for _, size in delivered)
    ends = [at_s for at_s, _ in bounds[1:]]
    for end_s, _ in delivered:
        passed = sum(size for at_s, size in delivered if raised_s < at_s <= end_s)
        allowed = sum(
            bound * max(min(until_s, end_s) - since_s, 0.0)
            for (since_s, bound), until_s in zip(bounds, ends, strict=False)
        )
        # What was owed before is at most one answer; a second more is what the old bound allows.
        assert passed <= 1.1 * (allowed + OLD) + largest
    total = sum(size for at_s, size in delivered if at_s > raised_s)
    assert total >= 2 * OLD * (delivered[-1][0] - raised_s)
