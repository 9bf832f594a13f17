"""What members of a tier ask each other, over real ports, and who may ask it."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from admin_world import AdminWorld, Ask, serve
from parts.quota_world import QuotaWorld
from tier_world import MemberTier, TierWorld, VisitRows
from tokens import CLOSED, OPEN, bearer, password

from proxy.admin.peers.peer_routes import MAX_VISITS_BYTES, TIER_PATH
from proxy.admin.port.guard import AccessRules
from proxy.quota.entities import ClientIdentity, QuotaKind
from proxy.quota.manager import SensorDebt
from proxy.state import Document, Record, StateError
from proxy.tier.budget_exchanges import BudgetLeasing
from proxy.tier.peer_client import (
    ALIVE_PATH,
    BUDGETS_PATH,
    LONG_ALIVE_PATH,
    RECORDS_PATH,
    VISITS_PATH,
    PeerClient,
)
from proxy.tier.peers import Peers
from proxy.tier.quota_keys import QuotaKeys
from proxy.tier.slot_map import SLOTS
from proxy.tier.visits import read_visit

ROW = ["default", None, "etl", "10.0.0.9", "consumer_byte_rate", 1024.0]
RECORD = Record.of("queries/etl", {"offset": 1}, 3)
ETL = ClientIdentity("main", None, "etl")
DEBT = SensorDebt(ETL, "client-id=etl", QuotaKind.CONSUMER_BYTE_RATE, 250.0)
HANDED = {"records": [[RECORD.key, RECORD.text, RECORD.version]], "owed": [DEBT.document()]}
ASKED = [("GET", ALIVE_PATH, {}), ("POST", VISITS_PATH, {"visits": []})]
ASKED += [("POST", RECORDS_PATH, {"records": [], "owed": []})]
SENSOR = "consumer_byte_rate:budget=link"
DEMAND = [SENSOR, SENSOR, [0, 0.0, 0.0], [1.0, 0.0, None, {}, []]]
VOTES = ["far/0#1", 1, [17]]


class Owner(MemberTier):
    """Keeps what it is told of, and what it is handed if it `has` the slots."""

    def __init__(self, name: str = "near/0", world: TierWorld | None = None) -> None:
        super().__init__(name, world or TierWorld([name]))
        self.has = True
        self.told: list[VisitRows] = []
        self.kept: list[tuple[Sequence[Record], Sequence[SensorDebt]]] = []

    def overview(self) -> Document:
        if not self.has:
            raise StateError("this machine is not in tier prod now", "ask another one")
        return super().overview()

    async def visited(self, rows: VisitRows) -> VisitRows:
        for row in rows:
            read_visit(row)
        self.told.append(rows)
        return [[*row[:-1], 250.0] for row in rows]

    def lease(self, document: Document) -> Sequence[Sequence[Any]]:
        keys = QuotaKeys(())
        return BudgetLeasing(
            *(self.name, QuotaWorld().quotas, Peers(PeerClient())),
            *(lambda: ([None] * SLOTS, frozenset()), lambda: keys),
        ).lease(document)

    async def keep(self, records: Sequence[Record], debts: Sequence[SensorDebt]) -> None:
        if not self.has:
            raise StateError("near/0 has not all of these slots", "send it again")
        self.kept.append((records, debts))

    @asynccontextmanager
    async def asked(self, access: AccessRules | None = None) -> AsyncIterator[Ask]:
        async with serve(AdminWorld().server(access=access, tier=self, member=self.name)) as ask:
            yield ask


@pytest.fixture
def owner() -> Owner:
    return Owner()


async def test_a_member_says_that_it_lives_and_what_visitors_owe(owner: Owner):
    async with owner.asked(CLOSED) as ask:
        assert (await ask("GET", ALIVE_PATH, headers=bearer("ops"))).json == {"member": "near/0"}
        told = await ask("POST", VISITS_PATH, json={"visits": [ROW, ROW]}, headers=bearer("ops"))
        assert (told.status, told.json) == (200, {"owed": [[*ROW[:-1], 250.0]] * 2})
    assert owner.told == [[ROW, ROW]]


async def test_who_follows_a_member_is_answered_when_it_ends_in_order(owner: Owner):
    server = AdminWorld().server(tier=owner)
    async with serve(server) as ask:
        following = asyncio.create_task(ask("GET", LONG_ALIVE_PATH))
        done, _ = await asyncio.wait([following], timeout=0.2)
        assert not done
        await server.stop()
        assert (await following).json == {"member": "near/0"}


async def test_the_overview_is_for_whoever_may_read(owner: Owner):
    async with owner.asked(CLOSED) as ask:
        assert (await ask("GET", TIER_PATH, headers=bearer("desk"))).json == {"name": "prod"}
        owner.has = False
        refused = await ask("GET", TIER_PATH, headers=bearer("desk"))
        assert (refused.status, refused.json["fix"]) == (503, "ask another one")


async def test_records_and_debts_arrive_as_they_were(owner: Owner):
    async with owner.asked() as ask:
        told = await ask("POST", RECORDS_PATH, json=HANDED)
        assert (told.status, told.json) == (200, {"kept": 1})
        owner.has = False
        told = await ask("POST", RECORDS_PATH, json=HANDED)
        assert (told.status, set(told.json)) == (503, {"error", "fix"})
    assert owner.kept == [([RECORD], [DEBT])]


@pytest.mark.parametrize("access", [OPEN, CLOSED])
@pytest.mark.parametrize(("method", "path", "body"), ASKED)
async def test_only_a_token_with_all_rights_asks_as_a_member(
    owner: Owner, access: AccessRules, method: str, path: str, body: Any
):
    how = {"json": body} if method == "POST" else {}
    async with owner.asked(access) as ask:
        assert (await ask(method, path, headers=bearer("ops"), **how)).status == 200
        for shown in (bearer("spark"), bearer("desk"), bearer("night")):
            answer = await ask(method, path, headers=shown, **how)
            assert (answer.status, set(answer.json)) == (403, {"error", "fix"})
        for shown in ({}, bearer("wrong"), password("desk")):
            assert (await ask(method, path, headers=shown, **how)).status in {401, 403}
        assert (await ask("DELETE", path, headers=bearer("ops"))).status == 405
    assert len(owner.told) + len(owner.kept) == (method == "POST")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *(
            (VISITS_PATH, body)
            for body in (
                *(b"", b"[]", b"{}", b'{"visits": 7}', b'{"visits": [7]}', b'{"visits"'),
                *(b'{"a":' * 9999, b"\xff"),
            )
        ),
        *(
            (VISITS_PATH, json.dumps({"visits": [ROW, row]}).encode())
            for row in (
                [],
                ROW[:-1],
                [*ROW, 1],
                [None, *ROW[1:]],
                [*ROW[:2], 7, *ROW[3:]],
                [*ROW[:-1], "1"],
                [*ROW[:-1], True],
                [*ROW[:-1], -1.0],
                [*ROW[:-1], float("nan")],
                [*ROW[:-1], float("inf")],
                [*ROW[:4], "nothing", 1.0],
            )
        ),
        *(
            (BUDGETS_PATH, json.dumps(document).encode())
            for document in (
                {},
                [],
                {"demands": [DEMAND]},
                {"votes": VOTES},
                {"votes": VOTES[:-1], "demands": []},
                {"votes": ["far/0#1", "x", []], "demands": []},
                {"votes": ["far/0#1", 1, ["x"]], "demands": []},
                {"votes": VOTES, "demands": [[]]},
                {"votes": VOTES, "demands": [DEMAND[:-1]]},
                {"votes": VOTES, "demands": [[*DEMAND[:2], [0, -1.0, 0.0], DEMAND[3]]]},
                {"votes": VOTES, "demands": [[*DEMAND[:2], [0, 1.0, 2.0], DEMAND[3]]]},
                {"votes": VOTES, "demands": [[*DEMAND[:2], [0, 1.0, 0.0, 1e9], DEMAND[3]]]},
                {"votes": VOTES, "demands": [[*DEMAND[:3], [float("nan"), 0.0, None, {}, []]]]},
                {"votes": VOTES, "demands": [[*DEMAND[:3], [1.0, 0.0, None, {"a": [1.0]}, []]]]},
                {"votes": VOTES, "demands": [[*DEMAND[:3], [1.0, 0.0, None, 7, []]]]},
                {"votes": VOTES, "demands": [[*DEMAND[:3], [1.0, 0.0, None, {}, 7]]]},
                {"votes": VOTES, "demands": [[*DEMAND[:3], [1.0, 0.0, None, {}, [[1.0]]]]]},
                {"votes": VOTES, "demands": [[*DEMAND[:3], [1.0, 0.0, None, {}, [[0, 9, 1]]]]]},
            )
        ),
        *(
            (RECORDS_PATH, json.dumps(document).encode())
            for document in (
                {},
                [],
                {"records": []},
                {"records": [["queries/etl", "{}"]], "owed": []},
                {"records": [["queries/etl", "{}", "x"]], "owed": []},
                {"records": 1, "owed": []},
                {"records": [], "owed": [1]},
            )
        ),
    ],
)
async def test_what_is_badly_formed_is_refused_and_nothing_of_it_taken(
    owner: Owner, path: str, body: bytes
):
    headers = {"Content-Type": "application/json"}
    async with owner.asked() as ask:
        answer = await ask("POST", path, data=body, headers=headers)
        assert (answer.status, set(answer.json)) == (400, {"error", "fix"})
        assert len(answer.json["error"]) < 400
        assert (await ask("GET", ALIVE_PATH)).status == 200
    assert (owner.told, owner.kept) == ([], [])


async def test_who_owns_no_budget_leases_nothing(owner: Owner):
    async with owner.asked(CLOSED) as ask:
        body = {"votes": VOTES, "demands": [DEMAND]}
        asked = await ask("POST", BUDGETS_PATH, json=body, headers=bearer("ops"))
        assert (asked.status, asked.json) == (200, {"leases": []})
        refused = await ask("POST", BUDGETS_PATH, json=body, headers=bearer("desk"))
        assert refused.status == 403


async def test_a_message_is_bounded_and_says_that_it_is_json(owner: Owner):
    async with owner.asked() as ask:
        headers = {"Content-Type": "application/json"}
        long = await ask("POST", VISITS_PATH, data=b" " * (MAX_VISITS_BYTES + 1), headers=headers)
        assert long.status == 413
        for path in (VISITS_PATH, RECORDS_PATH):
            assert (await ask("POST", path, data=b"{}")).status == 415


async def test_without_a_tier_there_is_nothing_to_ask_for(ask: Ask):
    for method, path, body in ASKED:
        how = {"json": body} if method == "POST" else {}
        assert (await ask(method, path, **how)).status == 404
    assert (await ask("GET", TIER_PATH)).status == 404
