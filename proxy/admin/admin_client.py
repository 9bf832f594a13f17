"""Asks the admin server of a running proxy, for the commands that change or ask something once."""

import json
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

DEFAULT_URL = "http://127.0.0.1:9644"
TIMEOUT_S = 30.0

# A proxy of the environment is for other hosts; this one is named by its own address.
_opener = build_opener(ProxyHandler({}))


class AdminRefusal(Exception):  # noqa: N818 - what came of it, for people
    """The admin server did not answer, or did not do what it was asked for: why, and the fix."""


def ask_admin(
    url: str, path: str, body: Mapping[str, object] | None = None, token_file: Path | None = None
) -> Any:
    """Return the JSON that a path gives: `GET`, or `POST` with a body. Raises AdminRefusal."""
    headers = {} if body is None else {"Content-Type": "application/json"}
    try:
        if token_file is not None:
            headers["Authorization"] = f"Bearer {token_file.read_text().strip()}"
        if urlsplit(url).scheme not in ("http", "https"):
            raise ValueError("it is not a URL such as http://127.0.0.1:9644")
        data = None if body is None else json.dumps(body).encode()
        request = Request(f"{url.rstrip('/')}{path}", data, headers)
        with _opener.open(request, timeout=TIMEOUT_S) as reply:
            return json.load(reply)
    except HTTPError as error:
        raise AdminRefusal(_refusal(url, error)) from None
    except URLError as error:
        fix = "start the proxy, or give the address of admin.bind as --url"
        raise AdminRefusal(f"{url} does not answer: {error.reason}\n    fix: {fix}") from None
    except (OSError, HTTPException, ValueError) as error:
        fix = "give the address of admin.bind as --url"
        raise AdminRefusal(f"{url!r} was not asked: {error}\n    fix: {fix}") from None


def _refusal(url: str, error: HTTPError) -> str:
    """Return what the proxy says of a refused request."""
    try:
        said = json.load(error)
        what, fix = said["error"], said["fix"]
    except (OSError, HTTPException, ValueError, TypeError, KeyError):
        fix = "see that it is a quota proxy of this version"
        return f"{url} answered {error.code} {error.reason}\n    fix: {fix}"
    token = "; give its file as --token-file" if error.code == 401 else ""  # noqa: PLR2004
    return f"{url} refuses: {what}\n    fix: {fix}{token}"
