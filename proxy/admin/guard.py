"""Decides whether an admin request may pass, and turns every failure into a JSON error."""

import hmac
import ipaddress
from collections.abc import Callable
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from structlog import get_logger

from proxy.admin.replies import ApiError

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing; all others need the token when one is set."""

_SCHEME = "Bearer "

_log = get_logger(__name__)


def guard(token_now: Callable[[], str | None]) -> Middleware:
    """Return the middleware that answers only requests that show what they must.

    With a token: the token, to change anything. Without one the server is on loopback, where the
    danger is a web page in a browser on the same machine. It may send requests here, and by DNS
    rebinding (its own name made to point at 127.0.0.1) read the answers. So then the `Host` must
    be an address or `localhost`, which no attacker's name is, and an `Origin`, which browsers add
    to what changes something, must be this server's.
    """

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        token = token_now()
        try:
            if token is None:
                _refuse_foreign_host(request)
                _refuse_foreign_origin(request)
            elif request.method not in SAFE_METHODS:
                _require_token(request, token)
            return await handler(request)
        except ApiError as error:
            return error.response()
        except web.HTTPException as error:
            return _known(error).response()
        except ConnectionError:  # the client has gone; nobody is left to answer
            raise
        except Exception:
            _log.exception("admin request failed", method=request.method, path=request.path)
            fix = "look at the proxy's log; the request may be sent again"
            return ApiError(500, "the proxy failed to answer this request", fix).response()

    return answer


def _require_token(request: web.Request, token: str) -> None:
    given = request.headers.get("Authorization", "")
    # Undecodable header bytes arrive as surrogates; they must not make the comparison fail.
    shown = given.removeprefix(_SCHEME).strip().encode("utf-8", "surrogateescape")
    if given.startswith(_SCHEME) and hmac.compare_digest(shown, token.encode()):
        return
    raise ApiError(
        401,
        "the token is wrong" if given else "a token is needed to change something",
        "send the header 'Authorization: Bearer TOKEN' with the text of admin.token_file",
        {"WWW-Authenticate": 'Bearer realm="quota-proxy"'},
    )


def _refuse_foreign_host(request: web.Request) -> None:
    host = request.headers.get("Host")
    if host is not None and not _is_own_name(host):  # every browser sends one
        fix = "ask for localhost or 127.0.0.1, or set admin.token_file"
        raise ApiError(421, f"the Host {host!r} is not this server's", fix)


def _is_own_name(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def _refuse_foreign_origin(request: web.Request) -> None:
    origin = request.headers.get("Origin")
    own = f"http://{request.headers.get('Host')}"
    if request.method not in SAFE_METHODS and origin not in (None, own):
        fix = "send it from a program on this machine, or set admin.token_file"
        raise ApiError(403, f"the request comes from a page of {origin!r}", fix)


def _known(error: web.HTTPException) -> ApiError:
    """Put aiohttp's own refusals into our words."""
    match error:
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            what = f"{error.method} does not work here"
            return ApiError(405, what, f"use one of {allowed}", {"Allow": allowed})
        case web.HTTPNotFound():
            return ApiError(404, "there is nothing here", "see docs/api.md for the paths")
    return ApiError(error.status, error.reason, "see docs/api.md for what is understood")
