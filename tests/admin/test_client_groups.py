"""Clients are counted and listed, however many quotas they have or share."""

import asyncio
from typing import Any

from admin_world import CONSUMER, MIB, PRODUCER, REQUEST, AdminWorld, Ask, serve

from proxy.quota.rules import Rule

LEAST_ROUNDS = 5
"""Of the event loop, which others have while so many are counted."""


def use(world: AdminWorld, client_id: str, user: str | None = None) -> None:
    """Let a client use all its quotas; its reading is held."""
    send = world.connect(client_id, user)
    send(600 * MIB)
    send(MIB, PRODUCER)
    send(1.0, REQUEST)


def counts(bounded: int, throttled: int, shown: int, left: int = 0) -> dict[str, int]:
    held = throttled
    return {
        "bounded": bounded, "throttled": throttled, "held": held, "left": left, "shown": shown
    }  # fmt: skip


async def get(ask: Ask, query: str = "") -> Any:
    return (await ask("GET", f"/v1/status?by=client{query}")).json


async def test_a_client_with_quotas_of_several_rules_counts_once(world: AdminWorld, ask: Ask):
    use(world, "etl-orders", "alice")
    status = await get(ask)
    assert status["client_counts"] == counts(bounded=1, throttled=1, shown=1)
    assert [(each["quota"], each["entity"]) for each in status["clients"]] == [
        ("consumer_byte_rate", "client-id=etl-orders"),
        ("producer_byte_rate", "user=alice,client-id=etl-orders"),
        ("request_percentage", "client-id=etl-orders"),
    ]
    assert {each["group"] for each in status["clients"]} == {
        "client-id=etl-orders, consumer_byte_rate"
    }
    assert (status["bounded"], status["throttled"], status["held"]) == (3, 1, 1)


async def test_the_limit_is_of_clients_and_the_counts_are_of_all(world: AdminWorld, ask: Ask):
    for client_id in ("a", "b", "c"):
        use(world, client_id, "alice")
    world.connect("d")(1.0)
    status = await get(ask, "&limit=1")
    assert status["client_counts"] == counts(bounded=4, throttled=3, shown=1)
    assert len(status["clients"]) == 3
    answer = (await ask("GET", "/v1/clients?by=client&filter=id%3Dd")).json
    assert answer["client_counts"] == counts(bounded=4, throttled=3, shown=1)
    assert [each["group"] for each in answer["clients"]] == ["client-id=d, consumer_byte_rate"]


async def test_who_shares_a_quota_is_counted_and_told_so(world: AdminWorld, ask: Ask):
    for number in range(30):
        use(world, f"consumer-reports-{number}")
    status = await get(ask)
    assert status["client_counts"] == counts(bounded=30, throttled=30, shown=30)
    shared, *own = status["clients"]
    assert (shared["group"], shared["client_count"], shared["shares"]) == (
        "client-id-prefix=consumer-reports-, consumer_byte_rate",
        30,
        [],
    )
    assert {each["quota"] for each in own} == {"request_percentage"}
    about = {"quota": CONSUMER, "entity": shared["entity"], "throttled": True}
    assert all(each["shares"] == [about] for each in own)


async def test_who_has_left_is_counted_until_it_is_forgotten(world: AdminWorld, ask: Ask):
    client = world.client_quotas("gone")
    client.charge(CONSUMER, 1.0, world.now_ms)
    client.charge(REQUEST, 1.0, world.now_ms)
    client.close()
    use(world, "here")
    status = await get(ask)
    assert status["client_counts"] == counts(bounded=2, throttled=1, shown=2, left=1)


async def test_without_clients_in_the_question_rows_are_as_ever(world: AdminWorld, ask: Ask):
    use(world, "a", "alice")
    for query in ("?limit=1", "?limit=1&by=quota"):
        (row,) = (await ask("GET", f"/v1/status{query}")).json["clients"]
        assert "group" not in row
    refused = await ask("GET", "/v1/status?by=rule")
    assert (refused.status, refused.json["fix"]) == (400, "write client or quota")


async def test_10_000_clients_do_not_stall_the_proxy():
    bounds = {CONSUMER: MIB, REQUEST: 50.0}
    world, rounds = AdminWorld((Rule(client_id="<default>", bounds=bounds),)), 0
    for number in range(10_000):
        send = world.connect(f"spark-{number}")
        send(20 * MIB)
        send(1.0, REQUEST)

    async def watch() -> None:
        nonlocal rounds
        while True:
            await asyncio.sleep(0)
            rounds += 1

    async with serve(world.server()) as ask:
        world.now_ms += 1000.0
        watching = asyncio.create_task(watch())
        answer = await ask("GET", "/v1/status?by=client&limit=60")
        watching.cancel()
    assert answer.json["client_counts"] == counts(10_000, 10_000, 60)
    assert rounds >= LEAST_ROUNDS
