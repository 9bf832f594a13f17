"""Answers what members of a tier ask each other, beside what everybody may ask."""

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from proxy.admin.admin_parts import AdminParts
from proxy.admin.audit import current_author
from proxy.admin.document_models import MISREAD
from proxy.admin.port.guard import require_all_rights
from proxy.admin.replies import ApiError, json_reply, parse_json, read_json_bytes
from proxy.quota.manager import SensorDebt
from proxy.state import Record
from proxy.tasks import wait_at_most
from proxy.tier.peer_client import ALIVE_PATH, BUDGETS_PATH, LONG_S, RECORDS_PATH, VISITS_PATH
from proxy.tier.tier_member import TierMember

TIER_PATH = "/v1/tier"

OF_MEMBERS = "/member/"  # begins what members alone may ask each other
LEFT_CHANGES_PATH = "/member/changes"

MAX_VISITS_BYTES = 16 * 2**20  # of one message; 10,000 visits with long names come to less
MAX_DEMANDS_BYTES = 2**20  # of one message; 200 demands with long names come to less
MAX_RECORDS_BYTES = 32 * 2**20  # of one message; one record has 8 MiB at most


class PeerRoutes:
    """The handlers. All but the overview are for who may do all."""

    def __init__(self, tier: TierMember, parts: AdminParts) -> None:
        self._tier = tier
        self._parts = parts
        self._ended = asyncio.Event()

    async def end(self, _: web.Application) -> None:
        """Have nobody wait for an answer any more: the server shuts down."""
        self._ended.set()

    def routes(self) -> list[web.RouteDef]:
        """Return the handlers by method and path."""
        return [
            web.get(TIER_PATH, self._get_tier),
            web.get(ALIVE_PATH, self._get_alive),
            web.post(VISITS_PATH, self._post_visits),
            web.post(RECORDS_PATH, self._post_records),
            web.post(BUDGETS_PATH, self._post_budgets),
            web.post(LEFT_CHANGES_PATH, self._post_changes),
        ]

    async def _get_tier(self, _: web.Request) -> web.Response:
        return json_reply(self._tier.overview())

    async def _get_alive(self, request: web.Request) -> web.Response:
        require_all_rights(current_author())
        if request.query.get("until") == "ended":
            await wait_at_most(LONG_S, self._ended.wait())
        return json_reply(self._tier.alive())

    async def _post_visits(self, request: web.Request) -> web.Response:
        form = '{"visits": [[LISTENER, USER, CLIENT_ID, ADDRESS, KIND, AMOUNT], ...]}'
        with _refusing("visits", form):
            document = await _read(request, MAX_VISITS_BYTES)
            return json_reply({"owed": await self._tier.visited(document["visits"])})

    async def _post_budgets(self, request: web.Request) -> web.Response:
        form = '{"votes": [PROCESS, NUMBER, SLOTS], "demands": [[RULE, SENSOR, LEASE, CLAIM]]}'
        with _refusing("demands", form):
            return json_reply({"leases": self._tier.lease(await _read(request, MAX_DEMANDS_BYTES))})

    async def _post_records(self, request: web.Request) -> web.Response:
        with _refusing("records", '{"records": [[KEY, TEXT, VERSION], ...], "owed": []}'):
            document = await _read(request, MAX_RECORDS_BYTES)
            records = [
                Record(str(key), str(text), int(version))
                for key, text, version in document["records"]
            ]
            debts = [SensorDebt.of(each) for each in document["owed"]]
        await self._tier.keep(records, debts)
        return json_reply({"kept": len(records)})

    async def _post_changes(self, request: web.Request) -> web.Response:
        """Record what was changed at another member, since the leader alone keeps the audit."""
        with _refusing("changes", '[{"what": WHAT, "before": BEFORE, "after": AFTER}, ...]'):
            changes = [
                (str(each["what"]), each["before"], each["after"])
                for each in json.loads(await read_json_bytes(request))
            ]
        for what, before, after in changes:
            await self._parts.audit.record(current_author(), what, before, after, time.time())
        return json_reply({"recorded": len(changes)})


async def _read(request: web.Request, most_bytes: int) -> Any:
    """Return the JSON that a member sends; long ones take a thread milliseconds."""
    require_all_rights(current_author())
    return await asyncio.to_thread(parse_json, await read_json_bytes(request, most_bytes))


@contextmanager
def _refusing(what: str, form: str) -> Iterator[None]:
    """Turn what reading a message raises that is none into an ApiError with status 400."""
    try:
        yield
    except MISREAD as error:
        raise ApiError(400, f"these are no {what}: {error}", f"send {form}") from None
