"""Reads what comes with an admin request, and writes the answer: JSON, or a Prometheus scrape."""

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from io import BytesIO
from itertools import islice
from types import SimpleNamespace
from typing import Any, TypeVar

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample
from pydantic_core import PydanticSerializationError, from_json, to_json

from proxy.quota.values import BadValueError
from proxy.slices import TimeSlicer
from proxy.state import Document

HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
"""On every JSON answer: the figures are of this moment, and are never taken for a page."""

JSON_HEADERS = {**HEADERS, "Content-Type": "application/json; charset=utf-8"}
SCRAPE_HEADERS = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}

OWN_BODY = web.RequestKey("own_body", bytes)
"""The body of a request that this process makes of itself."""

MAX_BODY_BYTES = 64 * 1024  # of a request that changes something
BODY_TIMEOUT_S = 10.0  # how long a body may take to arrive
MAX_REFUSED_CHARS = 60  # of a value, in a message
MAX_REQUEST_DIGITS = 15  # of a number in a path or query string
SAMPLES_AT_ONCE = 50  # samples of a scrape in one step; it takes about half a millisecond

Value = TypeVar("Value")


@dataclass(eq=False)
class ApiError(Exception):
    """A request that is refused, with what is wrong and how to mend it, for people."""

    status: int
    """Of HTTP, 400 or above."""
    what: str
    fix: str
    headers: Mapping[str, str] = field(default_factory=dict)
    """What the status asks for, such as `Allow`."""
    reason: str | None = None
    """A word for programs, where several causes have one status."""

    def response(self) -> web.Response:
        """Return the answer: `{"error": what, "fix": how}`, with `"reason"` if there is one."""
        reason = {} if self.reason is None else {"reason": self.reason}
        return json_reply(
            {"error": self.what, "fix": self.fix, **reason}, self.status, self.headers
        )


def json_reply(
    document: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """Return a document as a JSON answer."""
    return web.Response(
        body=json_text(document), status=status, headers={**JSON_HEADERS, **(headers or {})}
    )


def json_text(document: object) -> bytes:
    """Return a document as JSON, in ASCII: a page of 1,000 rows takes 2 ms.

    What else client ids hold could steer a terminal, or is half of a surrogate pair: only Python's
    writer escapes it, in five times the time.
    """
    with suppress(PydanticSerializationError):
        if (body := to_json(document)).isascii():
            return body
    return json.dumps(document, separators=(",", ":")).encode()


def parse_json(body: bytes) -> Any:
    """Return what JSON says. Raises ValueError or RecursionError for what is none."""
    try:
        return from_json(body)
    except ValueError:  # what has half of a surrogate pair, only Python reads
        return json.loads(body)


def object_or_none(body: bytes) -> Document | None:
    """Return the JSON object of a body; None for what is none."""
    try:
        document = parse_json(body)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def readiness_reply(not_ready: str | None, warning: str | None) -> web.Response:
    """Return what `/readyz` answers: a reason why clients should go elsewhere, or a warning."""
    if not_ready is None:
        return json_reply({"status": "ready"} | ({"warning": warning} if warning else {}))
    return json_reply({"status": "not ready", "reason": not_ready}, 503)


def long_reply(body: bytes, headers: Mapping[str, str], status: int = 200) -> web.Response:
    """Return a long body as an answer; aiohttp writes it in pieces, others run in between."""
    return web.Response(body=BytesIO(body), headers=headers, status=status)


async def read_json_bytes(request: web.Request, most_bytes: int = MAX_BODY_BYTES) -> bytes:
    """Return the body of a request that says it is JSON; it is not looked into.

    Raises ApiError: 400 when it is broken off, 408 when it is slow, 413 when it is longer than
    `most_bytes`, 415 when it is not said to be JSON.
    """
    if OWN_BODY in request:
        return request[OWN_BODY]
    if request.content_type != "application/json":
        fix = "send the header 'Content-Type: application/json'"
        raise ApiError(415, f"the body is {request.content_type}, not JSON", fix)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for piece in request.content.iter_any():
                body += piece
                if len(body) > most_bytes:
                    raise ApiError(413, "the body is too large", f"send at most {most_bytes} bytes")
    except TimeoutError:
        raise ApiError(408, "the body did not arrive in time", "send it at once") from None
    # RuntimeError: the connection was closed before what is to come was waited for.
    except (web.RequestPayloadError, RuntimeError):
        raise ApiError(400, "the body is broken off or badly framed", "send it again") from None
    return bytes(body)


def read_object(body: bytes, keys: Sequence[str], example: str) -> dict[str, object]:
    """Return a JSON object with these keys alone. Raises ApiError with status 400 for another."""
    fix = f"send {example}"
    try:
        document = json.loads(body, object_pairs_hook=_unique_keys)
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", fix) from None
    except ValueError as error:  # not UTF-8 is one as well
        why = str(error).partition(";")[0]  # behind it: what to do in Python about a long number
        raise ApiError(400, f"the body is not JSON: {why}", fix) from None
    if not isinstance(document, dict):
        raise ApiError(400, "the body is not a JSON object", fix)
    if unknown := sorted(set(document) - set(keys)):
        raise ApiError(400, f"unknown key {quote_json(unknown[0])}", f"use {', '.join(keys)}")
    return document


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return an object of JSON. Raises ApiError with status 400 where a key is there twice."""
    document: dict[str, object] = {}
    for key, value in pairs:
        if key in document:
            what = f"the key {quote_json(key)} is there twice"
            raise ApiError(400, what, "remove one of the two")
        document[key] = value
    return document


def parse_field(
    key: str, parse: Callable[[object], Value], value: object, fix: str | None = None
) -> Value:
    """Return a value that comes under a key. Raises ApiError with status 400 for a bad one."""
    try:
        return parse(value)
    except BadValueError as error:
        raise ApiError(400, f"{key}: {error.message}", fix or error.fix) from None


def quote_json(value: object) -> str:
    """Quote a value in a message, cut where it is long."""
    text = json.dumps(value) if not isinstance(value, dict | list) else "a collection"
    return text if len(text) <= MAX_REFUSED_CHARS else f"{text[:MAX_REFUSED_CHARS]}..."


def number_parameter(request: web.Request, name: str, default: int, most: int) -> int:
    """Return a number of the query string, 0 to `most`. Raises ApiError with status 400."""
    text = request.query.get(name, str(default))
    number = digits_or_none(text)
    if number is None or number > most:
        raise ApiError(400, f"{name}: {text!r} is no number from 0 to {most}", "write one of them")
    return number


def digits_or_none(text: str) -> int | None:
    """Return the number that some digits are, at most MAX_REQUEST_DIGITS; None for another text."""
    is_number = text.isascii() and text.isdecimal() and len(text) <= MAX_REQUEST_DIGITS
    return int(text) if is_number else None


def _family_text(family: Metric, samples: Iterable[Sample] = ()) -> bytes:
    """Return what `generate_latest` writes for some samples of a family."""
    part = Metric(family.name, family.documentation, family.type, family.unit)
    part.samples = list(samples)
    return generate_latest(SimpleNamespace(collect=lambda: (part,)))


async def scrape_reply(
    registry: CollectorRegistry, member: str, slices: TimeSlicer
) -> web.Response:
    """Return what `/metrics` answers, made a slice at a time."""
    body = BytesIO()
    # Not joined in the end: several megabytes take milliseconds.
    async with slices.long_answers:
        await slices.collect(map(body.write, scrape_pieces(registry, member)))
    return long_reply(body.getvalue(), SCRAPE_HEADERS)


def scrape_pieces(registry: CollectorRegistry, member: str) -> Iterator[bytes]:
    """Yield the text that `generate_latest` gives, a few samples in each piece.

    Sensors are measured here, in the thread that feeds them, each at its own moment.

    Each sample has the label `member` beside its own. Families must not have `_created` series,
    which would stand behind the others.
    """
    label = {"member": member}
    for family in registry.collect():
        head = _family_text(family)
        yield head
        samples = (each._replace(labels={**each.labels, **label}) for each in family.samples)
        while some := tuple(islice(samples, SAMPLES_AT_ONCE)):
            yield _family_text(family, some).removeprefix(head)
