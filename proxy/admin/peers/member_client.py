"""Asks members over HTTP, with bounds on time, size and connections."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

import aiohttp
from yarl import URL

from proxy.admin.port.member_headers import ONE_MEMBER, SCOPE
from proxy.admin.tier_protocol import MemberEndpoint

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

MAX_REFUSAL_BYTES = 300
"""Of a refusal that is shown."""

_SILENT = "it is silent: it has not answered for a while"

_PASSED = ("Content-Type", "WWW-Authenticate", "Allow", "Retry-After")
"""Headers of an answer that are passed on."""


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
        """Return the headers that go to who asked."""
        return {name: self.headers[name] for name in _PASSED if name in self.headers}


@dataclass(frozen=True, slots=True)
class NoReply:
    """A member that did not answer."""

    member: str
    why: str
    was_sent: bool = True
    """Whether it may have done what it was asked for."""
    alive: bool = True
    """Whether it has answered the tier lately."""


class MemberClient:
    """Keeps connections to the members. Only inside a running event loop; `close` it."""

    def __init__(self, timeout_s: float = MEMBER_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None
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
    ) -> Reply | NoReply:
        """Send a request, and return what came of it; `target` is sent as it is.

        `has_time`: it is not for looking only, and may take CHANGE_TIMEOUT_S.
        """
        name = endpoint.name
        timeout_s = max(self._timeout_s, CHANGE_TIMEOUT_S) if has_time else self._timeout_s
        loop = asyncio.get_running_loop()
        if not endpoint.alive:
            return NoReply(name, _SILENT, was_sent=False, alive=False)
        now_s = loop.time()
        if not has_time and now_s < self._spared.get(name, now_s):
            why = f"it did not answer within {timeout_s:g} s, a moment ago"
            return NoReply(name, why, was_sent=False)
        try:
            async with asyncio.timeout(timeout_s):
                reply = await self._exchange(endpoint, method, target, headers, body)
        except TimeoutError:
            now_s = loop.time()
            self._spared = {key: end_s for key, end_s in self._spared.items() if end_s > now_s}
            self._spared[name] = now_s + SPARED_S
            return NoReply(name, f"it did not answer within {timeout_s:g} s")
        except aiohttp.ClientConnectorCertificateError as error:
            why = f"its certificate is not trusted: {error.certificate_error}"
            return NoReply(name, why, was_sent=False)
        except aiohttp.ClientConnectorError as error:
            why = f"it can't be connected to: {error.os_error.strerror or error.os_error}"
            return NoReply(name, why, was_sent=False)
        # RuntimeError: all connections were closed meanwhile.
        except (aiohttp.ClientError, OSError, ValueError, RuntimeError) as error:
            return NoReply(name, f"it broke off: {error or type(error).__name__}")
        self._spared.pop(name, None)
        return reply if reply.headers.get(SCOPE) == ONE_MEMBER else _refused(reply)

    async def close(self) -> None:
        """Close all connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _exchange(
        self,
        endpoint: MemberEndpoint,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: bytes | None,
    ) -> Reply:
        """Raise ValueError for an answer that is too long, and what aiohttp does."""
        if endpoint.token is not None:
            headers = {**headers, "Authorization": f"Bearer {endpoint.token}"}
        url = URL(f"{endpoint.url.rstrip('/')}{target}", encoded=True)
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, limit_per_host=CONNECTIONS),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None),  # ours holds for waiting, too
                auto_decompress=False,
                trust_env=False,
            )
        async with self._session.request(
            method,
            url,
            headers=headers,
            data=body,
            allow_redirects=False,
            ssl=endpoint.tls or True,
        ) as response:
            received = bytearray()
            async for piece in response.content.iter_any():
                received += piece
                if len(received) > MAX_MEMBER_BYTES:
                    raise ValueError(f"its answer is above {MAX_MEMBER_BYTES} bytes")
            return Reply(endpoint.name, response.status, response.headers, bytes(received))


def _refused(reply: Reply) -> NoReply:
    """Return what came of a request that was not let in, or not by a member."""
    text = reply.body[:MAX_REFUSAL_BYTES].decode(errors="replace")
    was_sent = not HTTPStatus.BAD_REQUEST <= reply.status < HTTPStatus.INTERNAL_SERVER_ERROR
    why = f"it refuses to answer with {reply.status}: {text}"
    return NoReply(reply.member, why, was_sent=was_sent)
