"""Cuts lists into pages: `limit` rows, those that matter most or those behind a `cursor`."""

import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from bisect import insort, insort_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Generic, TypeVar

from aiohttp import web

from proxy.admin.replies import ApiError, number_parameter
from proxy.state import Document

MAX_LIMIT = 1_000

_CURSOR_FIX = "send `next` of the page before as it is, or nothing for the first page"

T = TypeVar("T")

Key = tuple[str | int, ...]
"""What tells a row of a list from others, and says where it is in the order of a walk."""


LISTS: Mapping[str, tuple[Key, int]] = {
    "/v1/status": ((), 100),
    "/v1/clients": (("entity", "quota"), 100),
    "/v1/unbounded": (("client", "user", "listener"), 100),
    "/v1/budgets": (("name", "quota"), MAX_LIMIT),
    "/v1/connections": ((0, "machine"), 100),
    "/v1/quotas": (("selector", "source"), MAX_LIMIT),
    "/v1/pipelines": (("name",), MAX_LIMIT),
    "/v1/progress": (("query", "topic", 0), MAX_LIMIT),
    "/v1/suggestions": (("name", "user", 0), MAX_LIMIT),
    "/v1/audit": ((0,), 100),
}
"""By the path of a list: what its keys are like, and how many rows an answer has unless the request
says. A list without keys is no walk's."""


_BY_RANK = itemgetter(0)
"""So that no two rows are ever compared."""


@dataclass(frozen=True, slots=True)
class PageRequest:
    """Which rows of a list a request is for."""

    limit: int
    """The most rows, 0 or more."""
    after: Key | None = None
    """Those behind this key, in the order of keys; () from the first. None: the most urgent."""


class PageBuilder(Generic[T]):
    """The rows of a page, which are added in any order: `rows`, and what `add` is called with.

    `urgency` puts a row before others where the page has no cursor; of equal ones the first come.
    """

    def __init__(
        self,
        page: PageRequest,
        key: Callable[[T], Key] = lambda _: (),
        urgency: Callable[[T], Any] = lambda _: 0,
        rows: Iterable[T] = (),
    ) -> None:
        self._page, self._key, self._urgency = page, key, urgency
        self._found: list[tuple[Any, T]] = []
        """Sorted by their keys, with one more than `limit` if there is a next page; without a
        cursor by their urgency."""
        self.total = 0
        """How many were added, whether they are of the page or not."""
        for row in rows:
            self.add(row)

    def add(self, row: T) -> bool:
        """Take a row in if it is among those of the page; return whether it may be."""
        after, limit, found = self._page.after, self._page.limit, self._found
        self.total += 1
        if after is not None:
            key = self._key(row)
            if key > after:
                insort(found, (key, row), key=_BY_RANK)
                del found[limit + 1 :]
            return key > after
        urgency = self._urgency(row)
        if len(found) == limit:
            if not found or urgency <= found[0][0]:
                return True
            del found[0]
        insort_left(found, (urgency, row), key=_BY_RANK)
        return True

    def rows(self) -> list[T]:
        """Return the rows of the page in their order, when all were added."""
        in_order = self._found if self._page.after is not None else reversed(self._found)
        return [row for _, row in in_order][: self._page.limit]

    def next(self, *others: str | None) -> Document:
        """Return the field `next` of a walk: the cursor of the page behind this one, if any.

        `others` are those of the members that the rows come from.
        """
        if self._page.after is None:
            return {}
        rows = self.rows()
        has_more = len(self._found) > len(rows) or any(others)
        return {"next": cursor_of(self._key(rows[-1])) if rows and has_more else None}


def cursor_of(key: Key) -> str:
    """Return a key as text that needs no encoding in a URL."""
    return urlsafe_b64encode(json.dumps(key).encode()).rstrip(b"=").decode()


def page_request_of(request: web.Request) -> PageRequest:
    """Read `?limit=N&cursor=TEXT` for the list of a path. Raises ApiError with status 400."""
    like, default = LISTS[request.path]
    limit = number_parameter(request, "limit", default, MAX_LIMIT)
    text = request.query.get("cursor")
    if text is None or not like:
        return PageRequest(limit)
    try:
        key = json.loads(urlsafe_b64decode(text + "=" * (-len(text) % 4)) or "[]")
        if text == "" or list(map(type, key)) == list(map(type, like)):
            return PageRequest(limit, tuple(key))
    except (ValueError, TypeError, RecursionError):  # a part of one, or another text
        pass
    raise ApiError(400, f"cursor: {text!r} is none of this list", _CURSOR_FIX)
