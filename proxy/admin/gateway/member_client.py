"""Asks members over HTTP, with bounds on time, size and connections."""

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import aiohttp
from yarl import URL

MEMBER_TIMEOUT_S = 2.0
"""For one answer as a whole. A member that is at work answers in milliseconds."""

CHANGE_TIMEOUT_S = 15.0
"""For what changes something: it is done when the state has it, and 10,000 rules are put in order
anew."""

SPARED_S = 2.0
"""For so long nobody waits again for a member that did not answer in time: who looks each second
would have the answers of all others held up."""

MAX_MEMBER_BYTES = 64 * 1024 * 1024
"""10,000 sensors come to some 20 MB."""

CONNECTIONS = 16
"""To one member at a time; further requests wait, within their time."""

_ENDED = "its process does not run"
_SILENT = "the machine is silent: it has not answered for a while"

_PASSED = ("Content-Type", "WWW-Authenticate", "Allow", "Retry-After")
"""Headers of an answer that are passed on."""


@dataclass(frozen=True, slots=True)
class MemberEndpoint:
    """Where a member answers."""

    name: str
    path: Path | None = None
    """Of its UNIX socket."""
    url: str | None = None
    """Of another machine's admin port, such as `https://10.0.0.7:9644`; without a `path`."""
    alive: bool = True
    """Whether its process runs, or the machine is not silent; one that is not is not asked."""
    token: str | None = field(default=None, repr=False)
    """Shown at `url`."""
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    """For `url`, the same object until it is renewed; None: the system's authorities."""

    @property
    def process_runs(self) -> bool | None:
        """Whether its process runs; None for a machine, of which that is not known."""
        return self.alive if self.path is not None else None


@dataclass(frozen=True, slots=True)
class Reply:
    """What a member answered."""

    member: str
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def is_ok(self) -> bool:
        """Whether it did what it was asked for."""
        return 200 <= self.status < 300  # noqa: PLR2004 - as HTTP has it

    def passed_headers(self) -> dict[str, str]:
        """Return the headers that go to who asked the gateway."""
        return {name: self.headers[name] for name in _PASSED if name in self.headers}


@dataclass(frozen=True, slots=True)
class NoReply:
    """A member that did not answer."""

    member: str
    why: str
    was_sent: bool = True
    """Whether it may have done what it was asked for."""
    alive: bool | None = True
    """Whether its process runs; None for a machine, of which that is not known."""
    is_known: bool = True
    """Whether its machine knows such a member."""


class MemberClient:
    """Keeps a session for each member. Only inside a running event loop; `close` it."""

    def __init__(
        self, timeout_s: float = MEMBER_TIMEOUT_S, max_bytes: int = MAX_MEMBER_BYTES
    ) -> None:
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._sessions: dict[MemberEndpoint, aiohttp.ClientSession] = {}
        self._spared: dict[str, float] = {}
        """Until when members are not asked, by their names; in the time of the event loop."""

    async def ask(
        self,
        endpoint: MemberEndpoint,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: bytes | None = None,
        *,
        has_time: bool = False,
        time_share: float = 1.0,
    ) -> Reply | NoReply:
        """Send a request, and return what came of it; `target` is sent as it is.

        `has_time`: it is not for looking only, and may take CHANGE_TIMEOUT_S. `time_share` is of
        the usual time, 0 to 1.
        """
        timeout_s = max(self._timeout_s, CHANGE_TIMEOUT_S) if has_time else self._timeout_s
        timeout_s *= time_share
        loop = asyncio.get_running_loop()
        missing = partial(NoReply, endpoint.name, alive=endpoint.process_runs)
        if not endpoint.alive:
            return missing(_SILENT if endpoint.path is None else _ENDED, was_sent=False)
        now_s = loop.time()
        if not has_time and now_s < self._spared.get(endpoint.name, now_s):
            why = f"it did not answer within {timeout_s:g} s, a moment ago"
            return missing(why, was_sent=False)
        try:
            async with asyncio.timeout(timeout_s):
                reply = await self._exchange(endpoint, method, target, headers, body)
        except TimeoutError:
            self._spared[endpoint.name] = loop.time() + SPARED_S
            return missing(f"it did not answer within {timeout_s:g} s")
        except aiohttp.ClientConnectorCertificateError as error:
            why = f"its certificate is not trusted: {error.certificate_error}"
            return missing(why, was_sent=False)
        except aiohttp.ClientConnectorError as error:
            why = f"it can't be connected to: {error.os_error.strerror or error.os_error}"
            return missing(why, was_sent=False)
        # RuntimeError: its session was closed meanwhile, since it is a member no more.
        except (aiohttp.ClientError, OSError, ValueError, RuntimeError) as error:
            return missing(f"it broke off: {error or type(error).__name__}")
        self._spared.pop(endpoint.name, None)
        return reply

    async def _exchange(
        self,
        endpoint: MemberEndpoint,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: bytes | None,
    ) -> Reply:
        """Raise ValueError for an answer that is too long, and what aiohttp does."""
        base = "http://member" if endpoint.path is not None else (endpoint.url or "").rstrip("/")
        if endpoint.token is not None:
            headers = {**headers, "Authorization": f"Bearer {endpoint.token}"}
        url = URL(f"{base}{target}", encoded=True)
        async with self._session(endpoint).request(
            method, url, headers=headers, data=body, allow_redirects=False
        ) as response:
            told = bytearray()
            async for piece in response.content.iter_any():
                told += piece
                if len(told) > self._max_bytes:
                    raise ValueError(f"its answer is above {self._max_bytes} bytes")
            return Reply(endpoint.name, response.status, response.headers, bytes(told))

    async def keep_only(self, endpoints: frozenset[MemberEndpoint]) -> None:
        """Close the sessions of all others: of members that are no more."""
        names = {each.name for each in endpoints}
        self._spared = {name: end_s for name, end_s in self._spared.items() if name in names}
        gone = [each for each in self._sessions if each not in endpoints]
        for endpoint in gone:
            session = self._sessions.pop(endpoint)
            await session.close()

    async def close(self) -> None:
        """Close all connections."""
        await self.keep_only(frozenset())

    def _session(self, endpoint: MemberEndpoint) -> aiohttp.ClientSession:
        session = self._sessions.get(endpoint)
        if session is None:
            connector: aiohttp.BaseConnector
            if endpoint.path is not None:
                # A connection costs little here, and none is left of a member that has ended.
                connector = aiohttp.UnixConnector(
                    str(endpoint.path), limit=CONNECTIONS, force_close=True
                )
            else:
                connector = aiohttp.TCPConnector(ssl=endpoint.tls or True, limit=CONNECTIONS)
            session = self._sessions[endpoint] = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None),  # ours holds for waiting, too
                auto_decompress=False,
                trust_env=False,
            )
        return session
