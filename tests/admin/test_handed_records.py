"""Records that are another machine's by new rules go there, over real ports."""

from collections.abc import Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from gateway_world import GatewayWorld
from tokens import CLOSED, bearer

from proxy.state import Record, StateError
from proxy.workers.handed_records import MachineRoutes
from proxy.tier.peers import RECORDS_PATH, PeerError, Peers

RECORD = Record.of("queries/etl", {"offset": 1}, 3)
OWED = ["main", None, "etl", "client-id=etl", "consumer_byte_rate", 250.0]

pytestmark = pytest.mark.timeout(60)


class NewOwner:
    """Keeps what it is handed, if it `has` the slots."""

    def __init__(self, *, has: bool = True) -> None:
        self.has = has
        self.kept: list[tuple[Sequence[Record], Sequence[list[Any]]]] = []

    async def keep(self, records: Sequence[Record], owed: Sequence[list[Any]]) -> None:
        if not self.has:
            raise StateError("machine b has not all of these slots", "send it again")
        self.kept.append((records, owed))

    def routes(self) -> MachineRoutes:
        async def no_visits(_: Any) -> Any:
            return []

        return MachineRoutes(dict, no_visits, dict, self.keep)

    @asynccontextmanager
    async def asked(self):
        async with GatewayWorld(("b/0",)).asked(tier_routes=self.routes()) as ask:
            yield ask


async def test_records_and_debts_arrive_as_they_were():
    owner = NewOwner()
    running = GatewayWorld(("b/0",)).running(access=CLOSED, tier_routes=owner.routes())
    async with running as address, Peers("ops-text", None) as peers:
        peers.use({"b": address})
        await peers.give("b", [RECORD], [OWED])
    assert owner.kept == [([RECORD], [OWED])]


async def test_who_has_not_the_slots_keeps_nothing():
    owner = NewOwner(has=False)
    running = GatewayWorld(("b/0",)).running(access=CLOSED, tier_routes=owner.routes())
    async with running as address, Peers("ops-text", None) as peers:
        peers.use({"b": address})
        with pytest.raises(PeerError, match=f"b: {RECORDS_PATH} answers 503"):
            await peers.give("b", [RECORD], [])


@pytest.mark.parametrize(
    "document",
    [
        {},
        [],
        {"records": []},
        {"records": [["queries/etl", "{}"]], "owed": []},
        {"records": [["queries/etl", "{}", "x"]], "owed": []},
        {"records": 1, "owed": []},
        {"records": [], "owed": [1]},
    ],
)
async def test_what_is_no_record_is_refused(document: Any):
    owner = NewOwner()
    async with owner.asked() as ask:
        told = await ask("POST", RECORDS_PATH, json=document)
        assert (told.status, set(told.json)) == (400, {"error", "fix"})
    assert not owner.kept


async def test_only_a_machine_may_hand_over():
    owner = NewOwner()
    world = GatewayWorld(("b/0",)).asked(access=CLOSED, tier_routes=owner.routes())
    async with world as ask:
        document = {"records": [], "owed": []}
        for shown in ("night", "spark"):
            told = await ask("POST", RECORDS_PATH, json=document, headers=bearer(shown))
            assert told.status == 403
    assert not owner.kept
