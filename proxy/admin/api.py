"""The paths below `/v1`: clients, quotas, status."""

import time
from collections.abc import Callable, Mapping
from urllib.parse import unquote

from aiohttp import web
from structlog import get_logger

from proxy.admin.bodies import json_body, number
from proxy.admin.clients import Clients, rule_entry
from proxy.admin.errors import ApiError, answer
from proxy.admin.overrides import ParseSize, parse_override
from proxy.admin.pieces import answer_in_slices
from proxy.admin.status import Status
from proxy.quota.rule_registry import RuleRegistry
from proxy.quota.selector import parse_selector, selector
from proxy.slices import Slices
from proxy.state import StateError

CLIENTS_PATH = "/v1/clients/"
QUOTAS_PATH = "/v1/quotas/"

ANY = "{tail:(?s:.+)}"
"""What follows may hold every character; see `_tail`."""

DEFAULT_LIMIT = 100
MAX_LIMIT = 1_000
"""How many clients one answer holds, unless and at most."""

MAX_OVERRIDE_BYTES = 64 * 1024
"""The longest body that sets a quota."""

_SELECTOR_FIX = "write KEY=VALUE,... with user, client-id, client-id-prefix or listener"

_log = get_logger(__name__)


class Api:
    """The handlers.

    Args:
        clients: describes the bounded clients.
        rules: where rules are listed and overridden.
        status: the document of the status page.
        parse_size: reads sizes in bodies.
        clock_ms: the monotonic time.
        slices: in which long answers are made.

    """

    def __init__(
        self,
        clients: Clients,
        rules: RuleRegistry,
        status: Status,
        parse_size: ParseSize,
        clock_ms: Callable[[], float],
        slices: Slices,
    ) -> None:
        self._clients = clients
        self._rules = rules
        self._status = status
        self._parse_size = parse_size
        self._clock_ms = clock_ms
        self._slices = slices

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [
            web.get("/v1/status", self._get_status),
            web.get("/v1/clients", self._get_clients),
            web.get(CLIENTS_PATH + ANY, self._get_client),
            web.get("/v1/quotas", self._get_quotas),
            web.put(QUOTAS_PATH + ANY, self._put_quota),
            web.delete(QUOTAS_PATH + ANY, self._delete_quota),
        ]

    async def _get_status(self, request: web.Request) -> web.Response:
        text, limit = _choice(request)
        document = await self._status.document(text, limit, self._clock_ms(), time.time())
        return await answer_in_slices(document, self._slices)

    async def _get_clients(self, request: web.Request) -> web.Response:
        text, limit = _choice(request)
        shown = await self._clients.pressing(text, limit)
        described = await self._clients.describe(shown.rows, self._clock_ms())
        unbounded = await self._clients.unbounded(text, limit)
        document = {"total": shown.total, "clients": described, **unbounded}
        return await answer_in_slices(document, self._slices)

    async def _get_client(self, request: web.Request) -> web.Response:
        entity = _tail(request, CLIENTS_PATH)
        rows = await self._clients.of_entity(entity)
        if not rows:
            raise ApiError(
                404,
                f"no client is measured as {entity!r}",
                "see GET /v1/clients; one that sent nothing for an hour is forgotten",
            )
        described = await self._clients.describe(rows, self._clock_ms())
        quotas = [
            {**document, "connected": self._clients.explain(row)}
            for row, document in zip(rows, described, strict=True)
        ]
        return answer({"entity": entity, "quotas": quotas})

    async def _get_quotas(self, _: web.Request) -> web.Response:
        entries = await self._slices.collect(map(rule_entry, self._rules.entries()))
        return await answer_in_slices({"quotas": entries}, self._slices)

    async def _put_quota(self, request: web.Request) -> web.Response:
        keys = _keys(request)
        body = await json_body(request, MAX_OVERRIDE_BYTES)
        override = parse_override(body, self._parse_size)
        try:
            entry = self._rules.put(keys, override.bounds, override.scope, override.by, time.time())
        except ValueError as error:
            raise ApiError(400, str(error), _SELECTOR_FIX) from None
        except StateError as error:
            raise _unkept(error) from error
        _log.info(
            "quota overridden", selector=selector(keys), by=override.by, remote=request.remote
        )
        return answer(rule_entry(entry))

    async def _delete_quota(self, request: web.Request) -> web.Response:
        keys = _keys(request)
        name = selector(keys)
        try:
            deleted = self._rules.delete(keys)
        except StateError as error:
            raise _unkept(error) from error
        if not deleted:
            raise ApiError(
                404,
                f"no override is in force for {name}",
                "see GET /v1/quotas; rules of the file are changed in the file",
            )
        _log.info("quota override deleted", selector=name, remote=request.remote)
        return answer({"deleted": name})


def _choice(request: web.Request) -> tuple[str, int]:
    """Read `?filter=TEXT&limit=N`."""
    limit = number(request, "limit", DEFAULT_LIMIT, MAX_LIMIT)
    return request.query.get("filter", "").lower(), limit


def _keys(request: web.Request) -> Mapping[str, str]:
    try:
        return parse_selector(_tail(request, QUOTAS_PATH))
    except ValueError as error:
        raise ApiError(400, str(error), _SELECTOR_FIX) from None


def _tail(request: web.Request, path: str) -> str:
    """Return what follows `path`, decoded once.

    Taken from the request line: aiohttp's own path has `.` and `..` resolved, and some characters
    decoded twice, but entities and selectors may hold anything.
    """
    raw = request.raw_path.partition("?")[0]
    if not raw.startswith(path):
        raise ApiError(404, "there is nothing here", "see docs/api.md for the paths")
    try:
        return unquote(raw.removeprefix(path), errors="strict").encode().decode()
    except UnicodeError:
        raise ApiError(400, "the path is not UTF-8", "percent-encode it as UTF-8") from None


def _unkept(error: StateError) -> ApiError:
    return ApiError(503, error.what, error.fix)
