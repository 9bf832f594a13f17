"""Each change is recorded: who, from where, when, what, from what to what; and it is kept."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from datetime import datetime

import aiohttp
import pytest
from admin_world import AdminWorld, Ask, Disk, running, serve
from structlog.testing import capture_logs

import proxy.admin.server as server_module
from proxy.admin.audit import BY_FILE, AuditedChange, AuditLog, Author
from proxy.admin.port.guard import AccessRight, AccessRules, AdminToken
from proxy.quota.rule_registry import Compose, ComposedRules, RuleRegistry
from proxy.state import MemoryStore, Record

ETL = "/v1/quotas/client-id=etl-orders"
ANNA = Author("anna", "10.0.0.7")
AT_S = 1_790_000_000.0


@pytest.fixture
async def ask_ops(world: AdminWorld) -> AsyncIterator[Ask]:
    """Asks a server with tokens of two names."""
    tokens = (AdminToken("ops", "ops-text"), AdminToken("desk", "desk-text", (AccessRight.READ,)))
    async with serve(world.server(access=AccessRules(tokens))) as ask:
        yield ask


async def changes(ask: Ask, query: str = "") -> list[dict[str, object]]:
    found: list[dict[str, object]] = (await ask("GET", f"/v1/audit{query}")).json["changes"]
    return found


async def test_a_change_says_who_and_from_what_to_what(ask_ops: Ask):
    ops = {"Authorization": "Bearer ops-text"}
    for rate in ("1MiB", "2MiB"):
        body = {"consumer_byte_rate": rate, "by": "anna"}
        assert (await ask_ops("PUT", ETL, json=body, headers=ops)).status == 200
    assert (await ask_ops("DELETE", ETL, headers=ops)).status == 200
    of_file = {
        "consumer_byte_rate": "10MiB per second",
        "scope": "each",
        "source": "file",
        "by": None,
    }
    first, second = (
        {**of_file, "consumer_byte_rate": rate, "source": "override", "by": "anna"}
        for rate in ("1MiB per second", "2MiB per second")
    )
    found = await changes(ask_ops)
    assert [(each["number"], each["before"], each["after"]) for each in found] == [
        (3, second, of_file),
        (2, first, second),
        (1, of_file, first),
    ]
    assert {(each["who"], each["address"], each["what"]) for each in found} == {
        ("ops", "127.0.0.1", "quota client-id=etl-orders")
    }
    times = [datetime.fromisoformat(str(each["at"])) for each in found]
    assert times == sorted(times, reverse=True)


async def test_it_says_what_is_only_observed_and_until_when(ask: Ask):
    body = {"consumer_byte_rate": "1MiB", "enforce": False}
    for more in ({"until": "2h"}, {"enforce": True}):
        assert (await ask("PUT", ETL, json=body | more)).status == 200
    enforced, observed = await changes(ask)
    assert (observed["after"]["enforce"], "enforce" in enforced["after"]) == (False, False)
    assert datetime.fromisoformat(observed["after"]["until"]).tzinfo is not None
    assert enforced["before"] == observed["after"]


async def test_changes_at_the_same_time_follow_one_another(world: AdminWorld):
    """The second one comes while the rules of the first are composed."""
    waiting: list[asyncio.Event] = []

    async def when_told(make: Compose) -> ComposedRules:
        waiting.append(asyncio.Event())
        await waiting[-1].wait()
        return make()

    world.rules = RuleRegistry(world.quotas, world.store, world.quotas.settings, when_told)
    rates = [f"{number}MiB" for number in range(1, 4)]
    async with serve(world.server()) as ask:
        puts = [
            asyncio.create_task(ask("PUT", ETL, json={"consumer_byte_rate": rate}))
            for rate in rates
        ]
        while not all(put.done() for put in puts):
            for each in waiting:
                each.set()
            await asyncio.sleep(0)
    made = list(world.audit.latest())[::-1]
    assert [each.before for each in made[1:]] == [each.after for each in made[:-1]]
    bounds = sorted(each.after["consumer_byte_rate"] for each in made)
    assert bounds == [f"{rate} per second" for rate in rates]


async def test_without_tokens_it_is_somebody_here(ask: Ask):
    await ask("PUT", "/v1/quotas/user=bob", json={"producer_byte_rate": "1MiB"})
    (change,) = await changes(ask)
    assert (change["who"], change["before"]) == ("local", None)
    await ask("DELETE", "/v1/quotas/user=bob")
    assert (await changes(ask))[0]["after"] is None


async def test_where_a_change_came_from_is_not_what_it_says(ask: Ask):
    forged = {"X-Forwarded-For": "10.9.9.9", "Forwarded": "for=10.9.9.9", "X-Real-IP": "10.9.9.9"}
    await ask("PUT", ETL, json={"consumer_byte_rate": "1MiB", "by": "file"}, headers=forged)
    (change,) = await changes(ask)
    assert (change["who"], change["address"]) == ("local", "127.0.0.1")


async def test_what_is_not_changed_is_not_recorded(world: AdminWorld, ask_ops: Ask):
    ops = {"Authorization": "Bearer ops-text"}
    body = {"consumer_byte_rate": "1MiB"}
    assert (await ask_ops("PUT", ETL, json=body)).status == 401
    desk = {"Authorization": "Bearer desk-text"}
    assert (await ask_ops("PUT", ETL, json=body, headers=desk)).status == 403
    assert (await ask_ops("PUT", ETL, json={}, headers=ops)).status == 400
    assert (await ask_ops("DELETE", ETL, headers=ops)).status == 404
    assert (await ask_ops("POST", "/v1/throttling", json={"on": True}, headers=ops)).status == 200
    level = {"level": "info"}
    assert (await ask_ops("PUT", "/v1/log_level", json=level, headers=ops)).status == 200
    world.store.is_full = True
    assert (await ask_ops("PUT", ETL, json=body, headers=ops)).status == 503
    assert await changes(ask_ops) == []


async def test_a_cancelled_change_that_is_kept_is_recorded(
    world: AdminWorld, monkeypatch: pytest.MonkeyPatch
):
    """As when the server stops while the rules are composed."""
    monkeypatch.setattr(server_module, "SHUTDOWN_TIMEOUT_S", 0.01)
    composing = asyncio.Event()

    async def never(_: Compose) -> ComposedRules:
        composing.set()
        return await asyncio.Future()

    world.rules = RuleRegistry(world.quotas, world.store, world.quotas.settings, never)
    async with aiohttp.ClientSession() as session:
        async with running(world.server()) as address:
            body = {"consumer_byte_rate": "1MiB"}
            put = asyncio.create_task(session.put(f"{address}{ETL}", json=body))
            await composing.wait()
        await asyncio.gather(put, return_exceptions=True)
    (change,) = world.audit.latest()
    assert (change.who, change.after["source"]) == ("local", "override")


async def test_the_newest_are_shown_and_found(world: AdminWorld, ask: Ask):
    for number in range(150):
        who = ANNA if number % 2 else BY_FILE
        await world.audit.record(who, f"subject {number}", number, None, AT_S + number)
    answer = (await ask("GET", "/v1/audit")).json
    assert answer["total"] == 150
    assert [each["number"] for each in answer["changes"]] == list(range(150, 50, -1))
    answer = (await ask("GET", "/v1/audit?limit=2&filter=ANNA")).json
    assert (answer["total"], [each["number"] for each in answer["changes"]]) == (75, [150, 148])
    assert [each["what"] for each in await changes(ask, "?filter=subject%207")][-1] == "subject 7"
    assert len(await changes(ask, "?filter=10.0.0.7")) == 75
    assert (await ask("GET", "/v1/audit?limit=1001")).status == 400
    status = (await ask("GET", "/v1/status")).json
    assert status["changes_total"] == 150
    assert [each["number"] for each in status["changes"]] == list(range(150, 130, -1))


async def recorded(store: MemoryStore, *subjects: str, kept: int = 3) -> list[AuditedChange]:
    """Record changes of these subjects in a log of its own over the store; return what it has."""
    log = AuditLog(store, kept)
    for subject in subjects:
        await log.record(ANNA, subject, None, {"a": [1, None, "é"]}, AT_S)
    return list(log.latest())


async def test_it_survives_a_restart_and_counts_on():
    store = MemoryStore()
    before = await recorded(store, "a", "b")
    assert [each.number for each in before] == [2, 1]
    assert await recorded(store) == before
    assert [each.number for each in await recorded(store, "c")] == [3, 2, 1]


async def test_the_oldest_are_forgotten():
    store = MemoryStore()
    assert [each.what for each in await recorded(store, *"abcdefg")] == ["g", "f", "e"]
    assert [record.key[-2:] for record in store.items("audit/")] == ["05", "06", "07"]
    assert [each.what for each in await recorded(store, "h", kept=2)] == ["h", "g"]
    assert len(store.items("audit/")) == 2


async def test_what_cannot_be_written_is_written_with_the_next():
    disk = Disk()
    log = AuditLog(disk, 3)
    with capture_logs() as logs:
        await log.record(ANNA, "a", None, 1, AT_S)
        disk.is_full = True
        for subject in "bcd":
            await log.record(ANNA, subject, None, 1, AT_S)
    assert {line["log_level"] for line in logs} == {"error"}
    assert [each.what for each in log.latest()] == ["d", "c", "b"]
    assert len(disk.items("audit/")) == 1
    disk.is_full = False
    await log.record(ANNA, "e", None, 1, AT_S)
    assert [each.what for each in AuditLog(disk, 3).latest()] == ["e", "d", "c"]
    assert len(disk.items("audit/")) == 3


class WatchedDisk(Disk):
    """A full disk that remembers how many records were to be written, and how many deleted."""

    is_full = True

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, int]] = []

    def put_many(self, records: Iterable[Record], *, delete: Iterable[str] = ()) -> int:
        records, delete = list(records), list(delete)
        self.asked.append((len(records), len(delete)))
        return super().put_many(records, delete=delete)


async def test_a_state_that_fails_for_long_takes_no_more_memory():
    disk = WatchedDisk()
    log = AuditLog(disk, kept=3)
    for _ in range(50):
        await log.record(ANNA, "a", None, 1, AT_S)
    assert len(disk.asked) == 50
    assert max(disk.asked) == disk.asked[-1] == (3, 0)  # nothing is there to be deleted
    assert len(list(log.latest())) == 3


async def test_what_cannot_be_read_is_left_out_and_said():
    store = MemoryStore()
    await recorded(store, "a", "b")
    store.put("audit/000000000000002", {"number": "x"})
    store.put("audit/000000000000003", {"of": "a newer version"}, version=2)
    with capture_logs() as logs:
        assert [each.number for each in await recorded(store, "c")] == [4, 1]
    assert [line["records"] for line in logs] == [2]
