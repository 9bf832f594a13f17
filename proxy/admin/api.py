"""Metrics, health, and what is below `/v1`, of this member."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from urllib.parse import unquote

from aiohttp import web

from metrics.clock import MS_PER_SECOND
from proxy.admin.admin_parts import AdminParts
from proxy.admin.audit import KEPT_CHANGES, current_author, log_change
from proxy.admin.client_documents import ClientDocuments, connections_document, explain_rules
from proxy.admin.document_models import iso, picked
from proxy.admin.pagination import PageBuilder, PageRequest, page_request_of
from proxy.admin.port.guard import REPORT_PATH, SCOPE
from proxy.admin.query_documents import grouped_by_query, partition_page_builder, partitions_of
from proxy.admin.replies import (
    MAX_BODY_BYTES,
    MAX_REQUEST_DIGITS,
    OWN_BODY,
    ApiError,
    digits_or_none,
    json_reply,
    number_parameter,
    read_json_bytes,
    read_object,
    readiness_reply,
    scrape_reply,
)
from proxy.admin.request_times import merged_times
from proxy.admin.rule_documents import (
    BUDGET_RULE,
    RULE,
    audited_rule_document,
    parse_override,
    parse_throttling,
    throttling_document,
)
from proxy.admin.suggestions import SUGGESTIONS_PATH, suggestions_reply
from proxy.log_queue import LEVELS, log_level
from proxy.progress.report import MAX_REPORT_BYTES, RefusalReason, ReportRefused
from proxy.quota.rule_registry import RuleEntry
from proxy.quota.rules import Budget, QuotaPause, quota_pause_name
from proxy.quota.validation import BUDGET_KEY, RULE_KEYS, format_selector, parse_selector
from proxy.release import VERSION
from proxy.state import Document

CLIENTS_PATH = "/v1/clients/"
CONNECTIONS_PATH = "/v1/connections/"
QUOTAS_PATH = "/v1/quotas/"
THROTTLING_PATH = "/v1/throttling"
LOG_LEVEL_PATH = "/v1/log_level"

ANY_NAME = "{tail:(?s:.+)}"  # what follows may hold every character; see `path_suffix`

MAX_CONNECTION_NUMBER = 10**MAX_REQUEST_DIGITS - 1  # of a connection, in the query string
LAST = "\U0010ffff"  # behind the name of every machine

_SELECTOR_FIX = f"write KEY=VALUE,... with {', '.join(RULE_KEYS)}, or {BUDGET_KEY}=NAME"


@asynccontextmanager
async def report_body_in_turn(request: web.Request, parts: AdminParts) -> AsyncIterator[bytes]:
    """Give the body of a report; a long one, of which many would fill the memory, in its turn.

    Members wait before they pass one on: to wait for each other's turns they might do for ever.
    """
    length = request.content_length
    is_passed_on = parts.tier is not None and (OWN_BODY in request or SCOPE in request.headers)
    is_long = not is_passed_on and (length is None or length > MAX_BODY_BYTES)
    async with parts.long_reports if is_long else nullcontext():
        yield await read_json_bytes(request, MAX_REPORT_BYTES)


class ApiRoutes:
    """The handlers."""

    def __init__(self, parts: AdminParts) -> None:
        self._parts = parts
        self._rules, self._audit, self._slices = parts.rules, parts.audit, parts.slices
        self._clients = ClientDocuments(parts)
        self._started_ms = parts.clock_ms()

    def routes(self) -> list[web.RouteDef]:
        """Return the handlers by method and path."""
        return [
            web.get("/metrics", self._get_metrics),
            web.get("/healthz", self._get_healthz),
            web.get("/readyz", self._get_readyz),
            web.get("/v1/status", self._get_status),
            web.get("/v1/clients", self._get_clients),
            web.get(CLIENTS_PATH + ANY_NAME, self._get_client),
            web.get("/v1/unbounded", self._get_unbounded),
            web.get("/v1/budgets", self._get_budgets),
            web.get("/v1/connections", self._get_connections),
            web.delete(CONNECTIONS_PATH + ANY_NAME, self._delete_connection),
            web.get("/v1/quotas", self._get_quotas),
            web.put(QUOTAS_PATH + ANY_NAME, self._put_quota),
            web.delete(QUOTAS_PATH + ANY_NAME, self._delete_quota),
            web.get(THROTTLING_PATH, self._get_throttling),
            web.post(THROTTLING_PATH, self._post_throttling),
            web.post(REPORT_PATH, self._post_report),
            web.get("/v1/progress", self._get_progress),
            web.get("/v1/pipelines", self._get_pipelines),
            web.get(LOG_LEVEL_PATH, self._get_level),
            web.put(LOG_LEVEL_PATH, self._put_level),
            web.get("/v1/audit", self._get_audit),
            web.get(SUGGESTIONS_PATH, partial(suggestions_reply, self._parts)),
        ]

    async def _get_metrics(self, _: web.Request) -> web.Response:
        return await scrape_reply(self._parts.metrics, self._parts.member, self._slices)

    async def _get_healthz(self, _: web.Request) -> web.Response:
        return json_reply({"status": "up"})

    async def _get_readyz(self, _: web.Request) -> web.Response:
        return readiness_reply(*self._parts.problems())

    async def _get_status(self, request: web.Request) -> web.Response:
        """Answer with all that the status page and `quota-proxy top` show."""
        parts, queries = self._parts, self._parts.queries
        page, times = page_request_of(request), parts.request_times()
        now_ms, now_s = parts.clock_ms(), time.time()
        reason, warning = parts.problems()
        sensors, fields = await self._clients.fields(
            filter_of(request), page, by_client=by_client_parameter(request), history=parts.history
        )
        changes_total, changes = parts.audit.documents()
        slots = {} if parts.tier is None else parts.tier.slots()
        document = {
            "version": VERSION,
            "at": iso(now_s),
            "uptime_s": round((now_ms - self._started_ms) / MS_PER_SECOND, 1),
            "ready": reason is None,
            "not_ready_reason": reason,
            "warning": warning,
            **parts.relay(),
            **sensors,
            **fields,
            "followed": len(await queries.documents()),
            "queries": await queries.summaries(now_s),
            "pipelines_total": len(await queries.pipelines()),
            "pipelines": await queries.pipeline_summaries(),
            "request_times": times if SCOPE in request.headers else merged_times(times),
            "changes_total": changes_total,
            "changes": changes,
            **({"slots": slots} if slots else {}),
        }
        return json_reply(document)

    async def _get_clients(self, request: web.Request) -> web.Response:
        sensors, fields = await self._clients.fields(
            filter_of(request), page_request_of(request), by_client=by_client_parameter(request)
        )
        return json_reply({"total": sensors["bounded"], **fields})

    async def _get_client(self, request: web.Request) -> web.Response:
        entity = path_suffix(request, CLIENTS_PATH)
        rows = await self._clients.of_entity(entity)
        if not rows:
            fix = "see GET /v1/clients; one that sent nothing for an hour is forgotten"
            raise ApiError(404, f"no client is measured as {entity!r}", fix)
        about = self._parts.now(), self._parts.quotas.table
        explained = [
            (row, {"connected": await asyncio.to_thread(explain_rules, row, *about)})
            for row in rows
        ]
        quotas = await self._clients.describe(explained)
        return json_reply({"entity": entity, "quotas": quotas})

    async def _get_unbounded(self, request: web.Request) -> web.Response:
        return json_reply(
            await self._clients.unbounded(filter_of(request), page_request_of(request))
        )

    async def _get_budgets(self, request: web.Request) -> web.Response:
        return json_reply(await self._clients.budgets(page_request_of(request)))

    async def _get_connections(self, request: web.Request) -> web.Response:
        page = connection_page_request(request, in_tier=self._parts.tier is not None)
        return json_reply(await connections_document(self._parts, filter_of(request), page))

    async def _delete_connection(self, request: web.Request) -> web.Response:
        name = path_suffix(request, CONNECTIONS_PATH)
        number = digits_or_none(name)
        row = self._parts.connections.close(number) if number is not None else None
        if row is None:
            fix = "see GET /v1/connections for those that are open"
            raise ApiError(404, f"no connection {name!r} is open", fix)
        peer, about = f"{row.ip}:{row.port}", picked(row, "user", "client_id", "listener")
        who, what = current_author(), f"connection {peer}"
        await self._audit.record(who, what, about, None, time.time())
        log_change("connection closed by an operator", peer=peer, **about)
        return json_reply({"closed": row.number})

    async def _get_quotas(self, request: web.Request) -> web.Response:
        now, entries = self._parts.now(), self._rules.composed.entries
        page = page_request_of(request)
        found = PageBuilder[RuleEntry](page, lambda each: (each.rule.selector, str(each.source)))
        await self._slices.collect(map(found.add, entries))
        budgets = self._rules.composed.budgets[: page.limit]
        rules = (RULE.document(entry, now) for entry in found.rows())
        documents = await self._slices.collect(rules)
        return json_reply(
            {
                "throttling": throttling_document(self._rules, now.now_s),
                "total": len(entries),
                "quotas": documents,
                "budgets": [BUDGET_RULE.document(each, now) for each in budgets],
                **found.next(),
            }
        )

    async def _put_quota(self, request: web.Request) -> web.Response:
        keys = _keys(request)
        body, now_s, name = await read_json_bytes(request), time.time(), format_selector(keys)
        async with self._audited(name):
            entry = await self._rules.put(parse_override(keys, body, now_s))
        log_change("quota overridden", selector=name, by=entry.by)
        model = BUDGET_RULE if isinstance(entry.rule, Budget) else RULE
        return json_reply(model.document(entry, self._parts.now()))

    async def _delete_quota(self, request: web.Request) -> web.Response:
        keys = _keys(request)
        name = format_selector(keys)
        async with self._audited(name):
            if not await self._rules.delete(keys):
                fix = "see GET /v1/quotas; rules of the file are changed in the file"
                raise ApiError(404, f"no override is in force for {name}", fix)
        log_change("quota override deleted", selector=name)
        return json_reply({"deleted": name})

    def _audited(self, name: str) -> AbstractAsyncContextManager[None]:
        def get() -> Document | None:
            entry = self._rules.composed.in_force.get(name)
            return None if entry is None else audited_rule_document(entry)

        return self._audit.recording(f"quota {name}", get, _SELECTOR_FIX)

    async def _get_throttling(self, _: web.Request) -> web.Response:
        return json_reply({"throttling": throttling_document(self._rules, time.time())})

    async def _post_throttling(self, request: web.Request) -> web.Response:
        now_s = time.time()
        keys, until_s, by = parse_throttling(await read_json_bytes(request), now_s)

        def pauses() -> Document:
            return {pause.name: iso(pause.until_s) for pause in self._rules.pauses()}

        async with self._audit.recording("pauses", pauses, "end some of them with on: true"):
            name = quota_pause_name(keys)
            if until_s is not None:
                await self._rules.pause(QuotaPause(keys, until_s, by, now_s))
            elif not await self._rules.resume(keys or None) and keys:
                fix = "see GET /v1/throttling for those that are paused"
                raise ApiError(404, f"{name} is not paused", fix)
        if until_s is None:
            log_change("throttling resumed", selector=name, by=by)
        else:
            log_change("throttling paused", "warning", until=iso(until_s), selector=name, by=by)
        return json_reply({"throttling": throttling_document(self._rules, now_s)})

    async def _post_report(self, request: web.Request) -> web.Response:
        try:
            async with report_body_in_turn(request, self._parts) as raw:
                return json_reply(await self._parts.reports.accept(raw, current_author().queries))
        except ReportRefused as error:
            if error.reason is RefusalReason.NOT_ALLOWED:
                await self._audit.record_refusal(error.message, time.time())
            reason = str(error.reason)
            raise ApiError(error.status, error.message, error.fix, reason=reason) from None

    async def _get_progress(self, request: web.Request) -> web.Response:
        documents = _named(
            request.query.get("query"),
            await self._parts.queries.documents(),
            "no query {!r} is followed",
            "see GET /v1/progress for those that are; name it under queries, or let "
            "QuotaListener report it",
        )
        found = partition_page_builder(page_request_of(request))
        await self._slices.collect(map(found.add, partitions_of(documents)))
        return json_reply({"queries": grouped_by_query(found.rows()), **found.next()})

    async def _get_pipelines(self, request: web.Request) -> web.Response:
        documents = _named(
            request.query.get("pipeline"),
            await self._parts.queries.pipelines(),
            "there is no pipeline {!r}",
            "see GET /v1/pipelines for those that there are; name it under pipelines in the "
            "configuration",
        )
        found = PageBuilder(
            page_request_of(request), lambda each: (str(each["name"]),), rows=documents
        )
        return json_reply({"pipelines": found.rows(), **found.next()})

    async def _get_level(self, _: web.Request) -> web.Response:
        return json_reply({"level": log_level.name})

    async def _put_level(self, request: web.Request) -> web.Response:
        before, name = log_level.name, _level(await read_json_bytes(request))
        async with self._audit.recording("log level", lambda: log_level.name):
            log_level.set(name)
        # As an error it is written at every level: the log should say why it says less.
        level = "error" if name == "error" else "warning"
        log_change("log level changed", level, before=before, after=name)
        return json_reply({"level": name})

    async def _get_audit(self, request: web.Request) -> web.Response:
        page, text = page_request_of(request), filter_of(request)
        # Of a thousand at most, which is one page.
        total, changes = self._audit.documents(KEPT_CHANGES, text)
        found = PageBuilder(page, lambda each: (-each["number"],), rows=changes)
        return json_reply({"total": total, "changes": found.rows(), **found.next()})


def filter_of(request: web.Request) -> str:
    """Read `?filter=TEXT`."""
    return request.query.get("filter", "").lower()


def connection_page_request(request: web.Request, *, in_tier: bool) -> PageRequest:
    """Return which connections a request is for; `after` is the id that a walk goes on behind.

    In a tier it may be MACHINE/N: with the same number those of later machines come behind.
    """
    page = page_request_of(request)
    if "after" not in request.query:
        return page
    if not in_tier:
        return PageRequest(
            page.limit, (number_parameter(request, "after", 0, MAX_CONNECTION_NUMBER), LAST)
        )
    text = request.query["after"]
    machine, _, digits = text.rpartition("/")
    number = digits_or_none(digits)
    if number is None:
        fix = f"write MACHINE/N, or 0 to {MAX_CONNECTION_NUMBER}"
        raise ApiError(400, f"after: {text!r} is no id of a connection", fix)
    return PageRequest(page.limit, (number, machine or LAST))


def by_client_parameter(request: web.Request) -> bool:
    """Read `?by=client`."""
    by = request.query.get("by", "quota")
    if by not in ("client", "quota"):
        raise ApiError(400, f"by: {by!r} is unknown", "write client or quota")
    return by == "client"


def _keys(request: web.Request) -> Mapping[str, str]:
    try:
        return parse_selector(path_suffix(request, QUOTAS_PATH))
    except ValueError as error:
        raise ApiError(400, str(error), _SELECTOR_FIX) from None


def _level(body: bytes) -> str:
    """Read a body such as `{"level": "debug"}`. Raises ApiError with status 400 for another."""
    level = read_object(body, ("level",), '{"level": "debug"}').get("level")
    if level not in LEVELS:
        raise ApiError(400, "the level is not known", f"use {', '.join(LEVELS)}")
    return str(level)


def path_suffix(request: web.Request, path: str) -> str:
    """Return what follows `path`, decoded once.

    Taken from the request line: aiohttp's own path has `.` and `..` resolved, and some characters
    decoded twice, but entities and selectors may hold anything.
    """
    raw = request.raw_path.partition("?")[0]
    if not raw.startswith(path):
        raise web.HTTPNotFound
    try:
        return unquote(raw.removeprefix(path), errors="strict").encode().decode()
    except UnicodeError:
        raise ApiError(400, "the path is not UTF-8", "percent-encode it as UTF-8") from None


def _named(
    name: str | None, documents: Sequence[Document], unknown: str, fix: str
) -> Sequence[Document]:
    """Return the documents of this name, or all when None; ApiError with 404 when there is none."""
    found = [each for each in documents if name in (None, each["name"])]
    if name is not None and not found:
        raise ApiError(404, unknown.format(name), fix)
    return found
