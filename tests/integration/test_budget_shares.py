"""Three real clients read through one budget: by their weights, and no more than it in all."""

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
from support.clients import CLIENTS, Access
from support.operating import call
from support.proxy_process import ProxyProcess, until

from examples.devkit.broker import EmbeddedBroker

MB = 1_000_000
BUDGET_BYTES = 3 * MB // 2
GUARANTEED_BYTES = MB // 2
BURST_S = 0.5
COUNT, RECORD_BYTES = 9_000, 10_000
"""More than the first of them reads in the time."""
READ_BYTES = MB // 2
"""Of each client, before anything is measured: all of them read by then."""
WINDOW_S = 6.0
LIMIT_S = 90.0
"""Until there was such a time in which no client waited for the machine."""
NAMES = ("etl", "notebook-a", "notebook-b")
PARTS = {"etl": 0.6, "notebook-a": 0.2, "notebook-b": 0.2}
ENTITY = {"quota_entity": "budget=analytics", "quota": "consumer_byte_rate"}

BUDGETS = [{"name": "analytics", "consumer_byte_rate": BUDGET_BYTES}]
RULES: list[dict[str, Any]] = [
    {"client-id": "etl", "budget": "analytics", "weight": 3, "guaranteed": GUARANTEED_BYTES},
    {"client-id-prefix": "notebook-", "budget": "analytics"},
]


class Taken(NamedTuple):
    """What clients have got, and when."""

    from_s: float
    until_s: float
    """Between the two."""
    size: dict[str, float]


def taken(running: ProxyProcess) -> Taken:
    from_s = time.monotonic()
    metrics = running.metrics()
    sizes = {name: metrics.value("bytes_total", client_id=name, api="Fetch") for name in NAMES}
    return Taken(from_s, time.monotonic(), sizes)


def is_shared(seen: list[Taken]) -> bool:
    """Return whether clients had their parts of nearly all, lately."""
    last = seen[-1]
    first = next(each for each in reversed(seen) if each is seen[0] or fits(each, last))
    got = {name: last.size[name] - first.size[name] for name in NAMES}
    total = sum(got.values())
    return (
        fits(first, last)
        and total >= 0.8 * BUDGET_BYTES * WINDOW_S
        and {name: size / total for name, size in got.items()} == pytest.approx(PARTS, rel=0.15)
    )


def fits(first: Taken, last: Taken) -> bool:
    return last.from_s - first.until_s >= WINDOW_S


def document(running: ProxyProcess) -> dict[str, Any]:
    return dict(json.loads(running.get("/v1/clients")[1]))


def all_wait(running: ProxyProcess) -> dict[str, Any] | None:
    """Return what is shown while all three want more than they get."""
    shown = document(running)
    is_full = shown["budgets"][0]["active_clients"] == len(NAMES)
    # A document is made in slices: what one part says may be over in the next.
    waits = shown["budgets"][0]["waiting"] and [
        row for row in shown["clients"] if row["waits_for"] and row["waiting"]
    ]
    return shown if is_full and waits else None


@pytest.mark.slow
def test_clients_of_a_budget_share_it_by_their_weights(
    kafka: EmbeddedBroker, proxy: Callable[..., ProxyProcess], topic: Callable[..., str]
) -> None:
    name = topic()
    records = ((0, b"%08d" % number + bytes(RECORD_BYTES - 8)) for number in range(COUNT))
    # Its batches are small: what an answer brings at least is little beside a share.
    CLIENTS[0].produce(Access(kafka.bootstrap), name, records)
    running = proxy(rules=RULES, quotas={"window": "1s", "budgets": BUDGETS})
    with ThreadPoolExecutor(len(NAMES)) as pool:
        reads = [
            pool.submit(client.consume, Access(running.bootstrap, client_id), name, COUNT)
            for client, client_id in zip(CLIENTS, NAMES, strict=True)
        ]
        try:
            until(lambda: min(taken(running).size.values()) >= READ_BYTES, "all of them read")
            seen = [taken(running)]
            shown = until(lambda: all_wait(running), "all want more than they get")

            def are_shares() -> bool:
                seen.append(taken(running))
                return is_shared(seen)

            until(are_shares, "each has its share", LIMIT_S)
            metrics, later = running.metrics(), document(running)
        finally:
            call(running, "POST", "/v1/throttling", {"off": "30m"})
        assert [read.result().count for read in reads] == [COUNT] * len(NAMES)

    before, after = seen[0], seen[-1]
    total = sum(after.size[name] - before.size[name] for name in NAMES)
    elapsed_s = after.until_s - before.from_s
    assert total <= 1.02 * BUDGET_BYTES * (elapsed_s + BURST_S), total / elapsed_s

    (budget,) = shown["budgets"]
    assert budget["name"] == "analytics"
    assert (budget["bound"], budget["guaranteed"]) == (BUDGET_BYTES, GUARANTEED_BYTES)
    assert (budget["waiting"] > 0, budget["enforced"]) == (True, True)
    rows = {row["entity"].removeprefix("client-id="): row for row in shown["clients"]}
    fields = ("budget", "weight", "guaranteed", "ceiling")
    assert [rows["etl"][key] for key in fields] == ["analytics", 3, GUARANTEED_BYTES, BUDGET_BYTES]
    assert [rows["notebook-a"][key] for key in fields] == ["analytics", 1, 0, BUDGET_BYTES]
    shares = {client: row["fair_share"] / BUDGET_BYTES for client, row in rows.items()}
    assert shares == pytest.approx(PARTS)
    (waits, *_) = [row for row in rows.values() if row["waits_for"] and row["waiting"]]
    assert "waits for its turn in budget analytics" in waits["waits_for"]
    assert waits["waiting"] > 0
    assert later["budgets"][0]["rate"] == pytest.approx(BUDGET_BYTES, rel=0.5)

    assert metrics.value("bound_bytes", **ENTITY) == BUDGET_BYTES
    assert metrics.value("rate_bytes", **ENTITY) == pytest.approx(BUDGET_BYTES, rel=0.5)
