"""Says who may do what on the admin port, and turns every failure into a JSON error."""

import binascii
import hmac
import ipaddress
import json
from base64 import b64decode
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from urllib.parse import quote, unquote, urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler
from structlog import get_logger

from proxy.admin.audit import LOCAL_AUTHOR, Author, Change, current_author, set_author
from proxy.admin.replies import ApiError
from proxy.progress.report import ALL_QUERIES, ReportableQueries
from proxy.state import StateError

OPEN_PATHS = ("/healthz", "/readyz", "/metrics")  # what the kubelet and Prometheus ask for
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})  # methods that change nothing

REPORT_PATH = "/v1/spark/batches"

SCOPE = "X-Quota-Proxy-Scope"
"""ONE_MEMBER, by another member: the answer is to be of the one that is asked alone. It is on the
answer as well, if the request was let in."""
ONE_MEMBER = "member"
AUTHOR = "X-Quota-Proxy-Author"  # with SCOPE: the name of who asks, percent-encoded
PEER = "X-Quota-Proxy-Peer"  # with SCOPE: the address of who asks; missing where there is none
QUERIES_HEADER = "X-Quota-Proxy-Queries"
"""With SCOPE, on which queries who asks may report: patterns, percent-encoded, with commas between
them; missing where on all."""
LEAVE_AUDIT = "X-Quota-Proxy-Leave-Audit"
"""With SCOPE, set to 1: the member records nothing, but says in CHANGES what is to be recorded."""
CHANGES = "X-Quota-Proxy-Changes"  # of an answer: changes as JSON, percent-encoded


class AccessRight(StrEnum):
    """What a token allows."""

    READ = "read"
    """To read all there is."""
    REPORT = "report"
    """To send reports of batches, as a Spark driver does."""
    QUOTAS = "quotas"
    """To change quotas, and whatever else changes what the proxy does."""


@dataclass(frozen=True, slots=True)
class AdminToken:
    """A secret, and what those may do who show it."""

    name: str
    text: str = field(repr=False)
    rights: Collection[AccessRight] = tuple(AccessRight)
    queries: ReportableQueries = ALL_QUERIES
    """On which it may report."""

    @property
    def has_all_rights(self) -> bool:
        """Whether it allows whatever can be done."""
        return set(self.rights) >= set(AccessRight) and self.queries == ALL_QUERIES


@dataclass(frozen=True, slots=True)
class AccessRules:
    """Who may do what. Without tokens everybody who can connect may do everything."""

    tokens: Sequence[AdminToken] = ()
    read_needs_token: bool = False
    """Whether reading needs a token with the right to."""
    open_paths: Collection[str] = OPEN_PATHS
    """What everybody may read all the same."""
    hosts: Collection[str] = ()
    """Names that the server is asked by, beside addresses and `localhost`; in lower case."""

    def find(self, shown: bytes) -> AdminToken | None:
        """Return the token with this text. How long it takes says nothing of the tokens' texts."""
        found = None
        for token in self.tokens:
            if hmac.compare_digest(shown, token.text.encode()):
                found = token
        return found

    def is_open(self, right: AccessRight, path: str) -> bool:
        """Return whether no token is needed."""
        if right is not AccessRight.READ:
            return not self.tokens
        return not self.read_needs_token or path in self.open_paths

    def knows_host(self, host: str) -> bool:
        """Return whether a `Host` header names this server."""
        try:
            name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
            if name == "localhost" or name in self.hosts:
                return True
            return bool(ipaddress.ip_address(name))
        except ValueError:
            return False


_BEARER, _BASIC = "bearer", "basic"

_CHALLENGES: Mapping[AccessRight, str] = {
    **dict.fromkeys(AccessRight, 'Bearer realm="quota-proxy"'),
    # Makes a browser ask for a name, which may be any, and the token as the password.
    AccessRight.READ: 'Basic realm="quota-proxy", charset="UTF-8"',
}

_TASKS: Mapping[AccessRight, str] = {
    AccessRight.READ: "read this",
    AccessRight.REPORT: "send a report",
    AccessRight.QUOTAS: "change this",
}

_log = get_logger(__name__)


class JsonErrorProtocol(web.RequestHandler):
    """Answers what is no request with a JSON error, too."""

    __slots__ = ()

    def handle_error(  # noqa: D102
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        plain = super().handle_error(request, status, exc, message)
        fix = "send HTTP/1.1, with at most 128 headers, and 8190 bytes in one or in the path"
        response = ApiError(plain.status, message or plain.reason, fix).response()
        response.force_close()
        return response


class Guard:
    """Lets only those requests pass that show what they must.

    A request needs a token with the right to what it does, unless that is open to all. Beside that
    there is the danger of a web page in the browser of somebody who can connect here. It may send
    requests, and by DNS rebinding (its own name made to point at this server) read the answers. So
    who shows no token must name an address, `localhost` or a known name as `Host`, which no
    attacker's name is. Where no tokens are, an `Origin`, which browsers add to what changes
    something, must be this server's. A token for a change is never taken as a password, which
    browsers send along by themselves.

    With `in_tier` other members ask as well, with the header SCOPE and all rights. Of such a
    request alone it is believed who asks.
    """

    def __init__(self, access: AccessRules, *, in_tier: bool = False) -> None:
        self.access = access
        """May be replaced at any time."""
        self._in_tier = in_tier

    @web.middleware
    async def answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a request that may pass; as a JSON error, one that may not or that fails."""

        async def admit(request: web.Request) -> web.StreamResponse:
            set_author(self._admit(request))
            is_scoped = self.is_scoped(request)
            return await (answer_member(request, handler) if is_scoped else handler(request))

        return await _answer(request, admit)

    def is_scoped(self, request: web.Request) -> bool:
        """Return whether a request is of a member, to this one alone."""
        return self._in_tier and SCOPE in request.headers

    def _admit(self, request: web.Request) -> Author:
        """Return who asks. Raises ApiError for a request that must not pass."""
        access, right = self.access, _right_for(request)
        token = access.find(shown) if (shown := _shown_token(request, right)) else None
        author = self._author_of(request, right, token)
        if not self.is_scoped(request):
            return author
        require_all_rights(author)
        if (scope := request.headers[SCOPE]) != ONE_MEMBER:
            raise ApiError(400, f"{SCOPE}: {scope!r} is unknown", f"write {ONE_MEMBER}")
        return _author_in(request.headers, author.name)

    def _author_of(
        self, request: web.Request, right: AccessRight, token: AdminToken | None
    ) -> Author:
        """Return who shows a token, or none. Raises ApiError as `_admit`."""
        access = self.access
        if not access.is_open(right, request.path):
            _require(token, right, request)
        if token is not None:
            return Author(token.name, request.remote, token.queries, token.has_all_rights)
        if not access.tokens or request.path not in access.open_paths:
            _refuse_foreign_host(request, access)
        if right is not AccessRight.READ:
            _refuse_foreign_origin(request)
        return Author(LOCAL_AUTHOR, request.remote, may_do_all=not access.tokens)


async def answer_member(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer a request of a member that may pass, with the changes that are left to it."""
    author = current_author()
    changes: list[Change] | None = [] if LEAVE_AUDIT in request.headers else None
    set_author(replace(author, deferred=changes))
    response = await _answer(request, handler)
    set_author(author)
    response.headers[SCOPE] = ONE_MEMBER
    if changes:
        response.headers[CHANGES] = quote(json.dumps(changes), safe="")
    return response


def require_all_rights(author: Author) -> None:
    """Refuse a request of a member unless its token has all rights. Raises ApiError with 403.

    Where there are no tokens everybody who can connect has them.
    """
    if not author.may_do_all:
        fix = "send the header 'Authorization: Bearer TOKEN' with the text of admin.token_file"
        raise ApiError(403, "only a token with all rights may ask as a member of the tier", fix)


def identity_headers(author: Author, *, leaves_audit: bool = False) -> dict[str, str]:
    """Return the headers of a request to a member, which say who asks."""
    headers = {SCOPE: ONE_MEMBER, AUTHOR: quote(author.name, safe="")}
    if author.address is not None:
        headers[PEER] = author.address
    if author.queries.patterns is not None:
        headers[QUERIES_HEADER] = ",".join(quote(each, safe="") for each in author.queries.patterns)
    if leaves_audit:
        headers[LEAVE_AUDIT] = "1"
    return headers


def _author_in(headers: Mapping[str, str], unnamed: str) -> Author:
    """Return who asks, by headers that are to be believed."""
    name = unquote(headers.get(AUTHOR, ""), errors="replace") or unnamed
    queries = ALL_QUERIES
    if (patterns := headers.get(QUERIES_HEADER)) is not None:
        queries = ReportableQueries(tuple(map(unquote, patterns.split(","))))
    return Author(name, headers.get(PEER), queries, may_do_all=True)


async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer a request; as a JSON error where it fails, or where the state is of no use to it."""
    try:
        return await handler(request)
    except ApiError as error:
        return error.response()
    except StateError as error:
        return ApiError(503, error.what, error.fix).response()
    except web.HTTPException as error:
        return _known(error).response()
    except ConnectionError:  # the client has gone; nobody is left to answer
        raise
    except Exception:
        _log.exception("admin request failed", method=request.method, path=request.path)
        fix = "look at the proxy's log; the request may be sent again"
        return ApiError(500, "the proxy failed to answer this request", fix).response()


def _right_for(request: web.Request) -> AccessRight:
    """Return the right that a request needs; whatever is not known as harmless needs the most."""
    if request.method in SAFE_METHODS:
        return AccessRight.READ
    resource = request.match_info.route.resource
    is_report = resource is not None and resource.canonical == REPORT_PATH
    return AccessRight.REPORT if is_report else AccessRight.QUOTAS


def _shown_token(request: web.Request, right: AccessRight) -> bytes | None:
    """Return the token that a request shows: as a bearer's, or, to read, as a password."""
    scheme, _, value = request.headers.get("Authorization", "").partition(" ")
    # Undecodable header bytes arrive as surrogates; they must not make the comparison fail.
    shown = value.strip().encode("utf-8", "surrogateescape")
    if scheme.lower() == _BEARER:
        return shown
    if scheme.lower() == _BASIC and right is AccessRight.READ:
        with suppress(binascii.Error):
            return b64decode(shown, validate=True).partition(b":")[2]
    return None


def _require(token: AdminToken | None, right: AccessRight, request: web.Request) -> None:
    if token is None:
        is_wrong = "Authorization" in request.headers
        raise ApiError(
            401,
            "the token is wrong" if is_wrong else f"a token is needed to {_TASKS[right]}",
            "send the header 'Authorization: Bearer TOKEN' with the text of admin.token_file, or "
            f"of one of admin.tokens with the right {right}",
            {"WWW-Authenticate": _CHALLENGES[right]},
        )
    if right not in token.rights:
        raise ApiError(
            403,
            f"the token {token.name!r} may not {_TASKS[right]}",
            f"use a token with the right {right}; this one has {', '.join(sorted(token.rights))}",
        )


def _refuse_foreign_host(request: web.Request, access: AccessRules) -> None:
    host = request.headers.get("Host")
    if host is not None and not access.knows_host(host):  # every browser sends one
        fix = "ask for an address or localhost, add the name to admin.hosts, or show a token"
        raise ApiError(421, f"the Host {host!r} is not this server's", fix)


def _refuse_foreign_origin(request: web.Request) -> None:
    origin = request.headers.get("Origin")
    scheme = "https" if request.secure else "http"
    if origin not in (None, f"{scheme}://{request.headers.get('Host')}"):
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
