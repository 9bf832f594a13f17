"""Asks the admin server of a running proxy, for the commands that change or ask something once."""

import json
import ssl
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import HTTPException
from typing import IO, Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

DEFAULT_URL = "http://127.0.0.1:9644"
TIMEOUT_S = 30.0


class AdminRefusal(Exception):  # noqa: N818 - what came of it, for people
    """The admin server did not answer, or did not do what it was asked for: why, and the fix."""

    def __init__(self, text: str, *, is_bad_input: bool = False) -> None:
        super().__init__(text)
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

    def open(
        self, path: str, body: Mapping[str, object] | None = None, timeout_s: float = TIMEOUT_S
    ) -> AbstractContextManager[IO[bytes]]:
        """Ask for a path: `GET`, or `POST` with a body.

        Raises OSError, HTTPException, or ValueError for what is no URL.
        """
        if urlsplit(self.url).scheme not in ("http", "https"):
            raise ValueError("it is not a URL such as http://127.0.0.1:9644")
        headers = {} if body is None else {"Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = Request(f"{self.url.rstrip('/')}{path}", data, headers)
        if self.token is not None:
            # Not where we are redirected to: it is for this server only.
            request.add_unredirected_header("Authorization", f"Bearer {self.token}")
        # A proxy of the environment is for other hosts; this one is named by its own address.
        opener = build_opener(ProxyHandler({}), HTTPSHandler(context=self.tls))
        answer: AbstractContextManager[IO[bytes]] = opener.open(request, timeout=timeout_s)
        return answer


def ask_admin(
    address: AdminAddress, path: str, key: str, body: Mapping[str, object] | None = None
) -> Any:
    """Return what a path gives under a key: `GET`, or `POST` with a body. Raises AdminRefusal."""
    url = address.url
    try:
        with address.open(path, body) as reply:
            document = json.load(reply)
        if not isinstance(document, dict) or key not in document:
            raise ValueError("it is not a quota proxy of this version")
        return document[key]
    except HTTPError as error:
        is_bad_input = error.code == HTTPStatus.BAD_REQUEST
        raise AdminRefusal(_refusal(url, error), is_bad_input=is_bad_input) from None
    except URLError as error:
        fix = "start the proxy, or give the address of admin.bind as --url"
        raise AdminRefusal(f"{url} does not answer: {error.reason}\n    fix: {fix}") from None
    except (OSError, HTTPException, ValueError) as error:
        fix = "give the address of admin.bind as --url"
        text = f"{url!r} does not answer as a proxy would: {error}"
        raise AdminRefusal(f"{text}\n    fix: {fix}") from None


def _refusal(url: str, error: HTTPError) -> str:
    """Return what the proxy says of a refused request."""
    try:
        said = json.load(error)
        what, fix = said["error"], said["fix"]
    except (OSError, HTTPException, ValueError, TypeError, KeyError):
        fix = "see that it is a quota proxy of this version"
        return f"{url} answered {error.code} {error.reason}\n    fix: {fix}"
    token = "; give its file as --token-file" if error.code == HTTPStatus.UNAUTHORIZED else ""
    return f"{url} refuses: {what}\n    fix: {fix}{token}"
