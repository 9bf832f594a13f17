"""What machines of a tier ask each other, over real ports, and who may ask it."""

import asyncio
import json
from collections.abc import Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from gateway_world import GatewayWorld
from tokens import CLOSED, OPEN, bearer, password

from proxy.admin.peers.tier_routes import MAX_VISITS_BYTES, TierRoutes
from proxy.admin.port.access import Access
from proxy.tier.peers import ALIVE_PATH, VISITS_PATH, PeerError, Peers

ROW = ["default", None, "etl", "10.0.0.9", "fetch", 1024.0]
LIMIT_S = 20

pytestmark = pytest.mark.timeout(60)


class Owner:
    """Keeps the visits that it is told of."""

    def __init__(self) -> None:
        self.told: list[Sequence[Sequence[Any]]] = []

    async def visited(self, rows: Sequence[Sequence[Any]]) -> Sequence[Sequence[Any]]:
        if any(row[4] == "nothing" for row in rows):
            raise ValueError("'nothing' is no kind")
        self.told.append(rows)
        return [[*row[:-1], 250.0] for row in rows]

    @asynccontextmanager
    async def asked(self, access: Access | None = None):
        routes = TierRoutes(lambda: {"machine": "near"}, self.visited, dict)
        async with GatewayWorld(("near/0",)).asked(access=access, tier_routes=routes) as ask:
            yield ask


async def test_a_machine_says_that_it_lives_and_what_visitors_owe():
    owner = Owner()
    async with owner.asked() as ask:
        assert (await ask("GET", ALIVE_PATH)).json == {"machine": "near"}
        told = await ask("POST", VISITS_PATH, json={"visits": [ROW, ROW]})
        assert (told.status, told.json) == (200, {"owed": [[*ROW[:-1], 250.0]] * 2})
    assert owner.told == [[ROW, ROW]]


async def test_peers_are_understood_with_the_token_of_all():
    owner = Owner()
    routes = TierRoutes(dict, owner.visited, dict)
    running = GatewayWorld(("near/0",)).running(access=CLOSED, tier_routes=routes)
    async with running as address, Peers("ops-text", None) as peers:
        peers.use({"near": address})
        assert await peers.tell("near", [ROW]) == [[*ROW[:-1], 250.0]]
        watch = asyncio.create_task(peers.watch())
        await asyncio.sleep(0.1)
        assert peers.silent == frozenset()
        watch.cancel()
        async with Peers("night-text", None) as stranger:
            stranger.use({"near": address})
            with pytest.raises(PeerError, match="403"):
                await stranger.tell("near", [ROW])


@pytest.mark.parametrize("access", [OPEN, CLOSED])
@pytest.mark.parametrize(("method", "path"), [("GET", ALIVE_PATH), ("POST", VISITS_PATH)])
async def test_only_a_token_with_all_rights_asks_as_a_machine(
    access: Access, method: str, path: str
):
    owner = Owner()
    how = {"json": {"visits": []}} if method == "POST" else {}
    async with owner.asked(access) as ask:
        assert (await ask(method, path, headers=bearer("ops"), **how)).status == 200
        for shown in (bearer("spark"), bearer("desk"), bearer("night")):
            answer = await ask(method, path, headers=shown, **how)
            assert (answer.status, set(answer.json)) == (403, {"error", "fix"})
        for shown in ({}, bearer("wrong"), password("desk")):
            assert (await ask(method, path, headers=shown, **how)).status in {401, 403}
        assert (await ask("DELETE", path, headers=bearer("ops"))).status == 405
    assert len(owner.told) == (method == "POST")


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"[]", b"{}", b'{"visits": 7}', b'{"visits": [7]}', b'{"visits"', b'{"a":' * 9999),
        b"\xff",
        *(
            json.dumps({"visits": [ROW, row]}).encode()
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
    ],
)
async def test_what_is_no_visit_is_refused_and_nothing_of_it_charged(body: bytes):
    owner = Owner()
    headers = {"Content-Type": "application/json"}
    async with owner.asked() as ask:
        answer = await ask("POST", VISITS_PATH, data=body, headers=headers)
        assert (answer.status, set(answer.json)) == (400, {"error", "fix"})
        assert len(answer.json["error"]) < 400
        assert (await ask("GET", ALIVE_PATH)).status == 200
    assert owner.told == []


async def test_a_message_is_bounded_and_says_that_it_is_json():
    async with Owner().asked() as ask:
        headers = {"Content-Type": "application/json"}
        long = await ask("POST", VISITS_PATH, data=b" " * (MAX_VISITS_BYTES + 1), headers=headers)
        assert long.status == 413
        assert (await ask("POST", VISITS_PATH, data=b"{}")).status == 415


async def test_without_a_tier_there_is_nothing_to_ask_for():
    async with GatewayWorld().asked(access=CLOSED) as ask:
        assert (await ask("GET", ALIVE_PATH, headers=bearer("ops"))).status == 404
        assert (await ask("POST", VISITS_PATH, headers=bearer("ops"), json={})).status == 404
