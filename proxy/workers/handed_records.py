"""Hands records to the machine that has their slot since the rules are other ones."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from proxy.admin.gateway.tier_routes import TierRoutes
from proxy.admin.port.guard import require_all_rights
from proxy.admin.replies import ApiError, answer, json_body
from proxy.admin.sliced_json import ROW_DEPTH, read_whole
from proxy.state import Record, StateError
from proxy.workers.peers import RECORDS_PATH

MAX_HANDED_BYTES = 32 * 2**20
"""Of one message; one record has 8 MiB at most."""


@dataclass(frozen=True, slots=True)
class MachineRoutes(TierRoutes):
    """What other machines ask; `handed` keeps records, and what clients owe, that are ours now.

    It raises StateError when they are not ours, or cannot be kept.
    """

    handed: Callable[[Sequence[Record], Sequence[list[Any]]], Awaitable[None]]

    def routes(self) -> list[web.RouteDef]:
        """Return the handlers by method and path."""
        return [*TierRoutes.routes(self), web.post(RECORDS_PATH, self._post_records)]

    async def _post_records(self, request: web.Request) -> web.Response:
        require_all_rights("ask as a machine of the tier")
        body = await json_body(request, MAX_HANDED_BYTES)
        try:
            document: Any = await asyncio.to_thread(read_whole, body, ROW_DEPTH)
            records = [
                Record(str(key), str(text), int(version))
                for key, text, version in document["records"]
            ]
            owed = [list(row) for row in document["owed"]]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            fix = 'send {"records": [[KEY, TEXT, VERSION], ...], "owed": []}'
            raise ApiError(400, f"these are no records: {error}", fix) from None
        try:
            await self.handed(records, owed)
        except StateError as error:
            raise ApiError(503, error.what, error.fix) from None
        return answer({"kept": len(records)})
