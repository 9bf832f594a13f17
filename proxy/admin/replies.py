"""Reads what comes with an admin request, and writes the answer: JSON, or a Prometheus scrape.

Long ones are read and written in small steps: nothing else runs during one call for megabytes.
"""

import asyncio
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from itertools import islice
from json.decoder import JSONArray, JSONObject  # type: ignore[attr-defined]
from types import SimpleNamespace
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from proxy.slices import Slices

HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
"""On every JSON answer: the figures are of this moment, and are never taken for a page."""

JSON_HEADERS = {**HEADERS, "Content-Type": "application/json; charset=utf-8"}

OWN_BODY = web.RequestKey("own_body", bytes)
"""The body of a request that this process makes of itself."""

MAX_BODY_BYTES = 64 * 1024  # of a request that changes something
BODY_TIMEOUT_S = 10.0  # how long a body may take to arrive
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_REQUEST_DIGITS = 15  # of a number in a path or query string
ROW_DEPTH = 2  # of the rows of the lists in a document
SAMPLES_AT_ONCE = 50  # samples of a scrape in one step; it takes about half a millisecond

_scan_at_once = json.JSONDecoder().scan_once  # type: ignore[attr-defined]


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
        return answer({"error": self.what, "fix": self.fix, **reason}, self.status, self.headers)


def answer(
    document: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """Return a document as a JSON answer."""
    return web.json_response(document, status=status, headers={**HEADERS, **(headers or {})})


def readiness_answer(not_ready: str | None, warning: str | None) -> web.Response:
    """Return what `/readyz` answers: a reason why clients should go elsewhere, or a warning."""
    if not_ready is None:
        return answer({"status": "ready"} | ({"warning": warning} if warning else {}))
    return answer({"status": "not ready", "reason": not_ready}, 503)


def answer_in_pieces(body: BytesIO, headers: Mapping[str, str], status: int = 200) -> web.Response:
    """Return a long body as an answer; aiohttp writes it in pieces, others run in between."""
    body.seek(0)
    return web.Response(body=body, headers=headers, status=status)


async def answer_in_slices(
    document: Mapping[str, object], slices: Slices, depth: int = ROW_DEPTH
) -> web.Response:
    """Return a long document as a JSON answer: nothing else would run during one json.dumps.

    Each value at `depth` is written in one step.
    """
    pieces = map(str.encode, written_pieces(document, depth))
    return answer_in_pieces(await made_in_slices(pieces, slices), JSON_HEADERS)


async def made_in_slices(pieces: Iterator[bytes], slices: Slices) -> BytesIO:
    """Return a long body that is made a slice at a time."""
    body = BytesIO()
    # Not joined in the end: several megabytes take milliseconds.
    async with slices.long_answers:
        await slices.collect(map(body.write, pieces))
    return body


async def json_body(request: web.Request, most_bytes: int = MAX_BODY_BYTES) -> bytes:
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
    except web.RequestPayloadError:
        raise ApiError(400, "the body is broken off or badly framed", "send it again") from None
    return bytes(body)


def whole_number(request: web.Request, name: str, default: int, most: int) -> int:
    """Return a number of the query string, 0 to `most`. Raises ApiError with status 400."""
    text = request.query.get(name, str(default))
    number = parse_number(text)
    if number is None or number > most:
        raise ApiError(400, f"{name}: {text!r} is not a number", f"write 0 to {most}")
    return number


def parse_number(text: str) -> int | None:
    """Return the number that some digits are, at most MAX_REQUEST_DIGITS; None for another text."""
    is_number = text.isascii() and text.isdecimal() and len(text) <= MAX_REQUEST_DIGITS
    return int(text) if is_number else None


def read_whole(body: bytes, depth: int) -> Any:
    """Return a document, read in steps: each value at `depth` below its top, or deeper, is one.

    With 2, each item of the lists that the document has is a step. For a thread: between two steps
    the event loop may run. Raises ValueError for what is no JSON, RecursionError for what is nested
    too deeply.
    """
    decoder = json.JSONDecoder()
    decoder.scan_once = partial(_scan, depth)  # type: ignore[attr-defined]
    return decoder.decode(body.decode())


def _scan(depth: int, text: str, at: int) -> tuple[Any, int]:
    """Read the value that begins there; return it, and where it ends.

    In Python down to `depth`, as the decoder does without its part in C.
    """
    scan = partial(_scan, depth - 1)
    match text[at : at + 1]:
        case "[" if depth:
            array: tuple[Any, int] = JSONArray((text, at + 1), scan)
            return array
        case "{" if depth:
            members: tuple[Any, int] = JSONObject((text, at + 1), True, scan, None, None)
            return members
    value: tuple[Any, int] = _scan_at_once(text, at)
    return value


def written_pieces(value: Any, depth: int = ROW_DEPTH) -> Iterator[str]:
    """Yield the text that `json.dumps` gives, each value at `depth` below the top by itself.

    An iterator is written as a list, so that of thousands of items none is kept.
    """
    if depth and isinstance(value, dict):
        yield "{"
        for number, (key, member) in enumerate(value.items()):
            yield f"{', ' if number else ''}{json.dumps(key)}: "
            yield from written_pieces(member, depth - 1)
        yield "}"
    elif depth and isinstance(value, list | Iterator):
        yield "["
        for number, item in enumerate(value):
            if number:
                yield ", "
            yield from written_pieces(item, depth - 1)
        yield "]"
    else:
        yield json.dumps(value)


def _family_text(family: Metric, samples: Iterable[Sample] = ()) -> bytes:
    """Return what `generate_latest` writes for some samples of a family."""
    part = Metric(family.name, family.documentation, family.type, family.unit)
    part.samples = list(samples)
    return generate_latest(SimpleNamespace(collect=lambda: (part,)))


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
