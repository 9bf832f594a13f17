"""Asks the admin server of a running proxy, for the commands that change or ask something once."""

import json
import ssl
from collections.abc import Mapping, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import HTTPException
from typing import IO
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

from proxy.state import Document

PAGE_ROWS = 1_000  # as many as an answer may have
DEFAULT_URL = "http://127.0.0.1:9644"
_FIX_URL = "give the address of admin.bind as --url"


class AdminRefusal(Exception):  # noqa: N818 - what came of it, for people
    """The admin server did not answer, or did not do what it was asked for: why, and the fix."""

    def __init__(self, problem: str, fix: str, *, is_bad_input: bool = False) -> None:
        super().__init__(f"{problem}\n    fix: {fix}")
        self.problem = problem
        self.is_bad_input = is_bad_input
        """Whether what was given to the command is the mistake, such as `--for abc`."""


@dataclass(frozen=True, slots=True)
class AdminAddress:
    """Where a proxy's admin server is, and what it wants to see."""

    url: str
    """Such as `http://127.0.0.1:9644`."""
    tls: ssl.SSLContext | None = None
    """None: the system's authorities sign its certificate, and it wants none of ours."""
    token: str | None = field(default=None, repr=False)
    timeout_s: float = 30.0
    """For each answer."""

    def open(
        self,
        path: str,
        body: Mapping[str, object] | None = None,
        content_type: str = "application/json",
    ) -> AbstractContextManager[IO[bytes]]:
        """Ask for a path: `GET`, or `POST` with a body.

        Raises OSError, HTTPException, or ValueError for what is no URL.
        """
        if urlsplit(self.url).scheme not in ("http", "https"):
            raise ValueError("it is not a URL such as http://127.0.0.1:9644")
        headers = {} if body is None else {"Content-Type": content_type}
        data = None if body is None else json.dumps(body).encode()
        request = Request(f"{self.url.rstrip('/')}{path}", data, headers)
        if self.token is not None:
            # Not where we are redirected to: it is for this server only.
            request.add_unredirected_header("Authorization", f"Bearer {self.token}")
        # A proxy of the environment is for other hosts; this one is named by its own address.
        opener = build_opener(ProxyHandler({}), HTTPSHandler(context=self.tls))
        answer: AbstractContextManager[IO[bytes]] = opener.open(request, timeout=self.timeout_s)
        return answer

    def read(self, path: str, body: Mapping[str, object] | None = None) -> bytes:
        """Return what a path answers: `GET`, or `POST` with a body. Raises AdminRefusal."""
        try:
            with self.open(path, body) as reply:
                return reply.read()
        except HTTPError as error:
            is_bad_input = error.code == HTTPStatus.BAD_REQUEST
            what, fix = reason_of(error)
            if error.code == HTTPStatus.UNAUTHORIZED:
                fix += "; give its file as --token-file"
            problem = f"{self.url} refuses with {error.code}: {what}"
            raise AdminRefusal(problem, fix, is_bad_input=is_bad_input) from None
        except URLError as error:
            fix = f"start the proxy, or {_FIX_URL}"
            raise AdminRefusal(f"{self.url} does not answer: {error.reason}", fix) from None
        except (OSError, HTTPException, ValueError) as error:
            problem = f"{self.url!r} does not answer as a proxy would: {error}"
            raise AdminRefusal(problem, _FIX_URL) from None

    def document(
        self,
        path: str,
        known: Set[str] = frozenset(),
        body: Mapping[str, object] | None = None,
    ) -> Document:
        """Return the JSON object that a path answers with, which has these keys. As `read`."""
        try:
            document = json.loads(self.read(path, body))
        except ValueError:
            document = None
        if not isinstance(document, dict) or not known <= document.keys():
            raise AdminRefusal(f"{self.url} is not a quota proxy of this version", _FIX_URL)
        return document

    def rows(self, path: str, key: str) -> list[Document]:
        """Return all rows of a list, page by page. As `read`."""
        rows: list[Document] = []
        cursor: str | None = ""
        while cursor is not None:
            page = self.document(f"{path}?limit={PAGE_ROWS}&cursor={cursor}", {key})
            rows += page[key]
            cursor = page.get("next")
        return rows


def reason_of(error: HTTPError) -> tuple[str, str]:
    """Return why the proxy refused a request, and the fix."""
    try:
        said = json.load(error)
        return str(said["error"]), str(said["fix"])
    except (OSError, HTTPException, ValueError, TypeError, KeyError):
        return error.reason, "see that it is a quota proxy of this version"
