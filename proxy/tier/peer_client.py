"""How members ask each other, over HTTP at their admin ports."""

import ssl
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp
from yarl import URL

ALIVE_PATH = "/v1/tier/alive"
VISITS_PATH = "/v1/tier/visits"
RECORDS_PATH = "/v1/tier/records"
BUDGETS_PATH = "/v1/tier/budgets"

LONG_ALIVE_PATH = "/v1/tier/alive?until=ended"
"""Is answered after LONG_S, or when the member ends in order: when it dies its connection breaks,
and who asks knows at once."""

LONG_S = 20.0

MAX_MEMBER_BYTES = 64 * 1024 * 1024  # of an answer; 10,000 sensors come to some 20 MB


@dataclass(frozen=True, slots=True)
class Target:
    """A member, and where it answers."""

    name: str
    url: str = ""
    """Of its admin port, such as `https://10.0.0.7:9644`."""
    alive: bool = True
    """Whether it has answered lately; one that has not is not asked."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a member answered."""

    member: str
    status: int
    headers: Mapping[str, str]
    body: bytes
    reason: str = ""
    """What HTTP's first line says of the status."""

    @property
    def is_ok(self) -> bool:
        """Whether it did what it was asked for."""
        return 200 <= self.status < 300  # noqa: PLR2004 - as HTTP has it


class PeerError(Exception):
    """A member has not answered, or not as it should."""

    def __init__(self, member: str, why: str, *, was_sent: bool = True, alive: bool = True) -> None:
        super().__init__(f"{member}: {why}")
        self.member, self.why = member, why
        self.was_sent = was_sent
        """Whether the member may have done what it was asked for."""
        self.alive = alive
        """Whether it has answered the tier lately."""


class PeerDownError(PeerError):
    """Nobody listens at a member's port."""


@dataclass(slots=True, eq=False)
class PeerClient:
    """The connections of one member to the others, which are opened as they are needed."""

    token: str | None = None
    """Shown to them: that of `admin.token_file`, which all have. May be replaced at any time."""
    tls: ssl.SSLContext | None = None
    """The same, for URLs with https; None: the system's authorities are trusted."""
    _most_bytes: int = MAX_MEMBER_BYTES
    _session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Break off all requests, and close all connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def send(
        self,
        to: Target,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: bytes | None,
        most_bytes: int | None = None,
    ) -> Reply:
        """Return what a member answers, whatever it says and when. Raises PeerError.

        `target` is sent as it is, `body` as JSON; no redirection is followed. An answer has at most
        `most_bytes`, None: as the client says.
        """
        session, own = self._session, dict(headers)
        if session is None:
            session = self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None),  # who asks has a limit for all of it
                auto_decompress=False,
                trust_env=False,
            )
        if body is not None:
            own.setdefault("Content-Type", "application/json")
        if self.token is not None:
            own["Authorization"] = f"Bearer {self.token}"
        tls, received = self.tls or True, bytearray()
        most_bytes = most_bytes or self._most_bytes
        try:
            url = URL(f"{to.url.rstrip('/')}{target}", encoded=True)  # as the member says
            async with session.request(
                method, url, headers=own, data=body, allow_redirects=False, ssl=tls
            ) as response:
                async for piece in response.content.iter_any():
                    received += piece
                    if len(received) > most_bytes:
                        raise ValueError(f"its answer is above {most_bytes} bytes")
                reason = response.reason or ""
                return Reply(to.name, response.status, response.headers, bytes(received), reason)
        except aiohttp.ClientConnectorCertificateError as error:
            why = f"its certificate is not trusted: {error.certificate_error}"
            raise PeerError(to.name, why, was_sent=False) from None
        except aiohttp.ClientConnectorError as error:
            is_away = isinstance(error.os_error, ConnectionRefusedError)
            why = f"it can't be connected to: {error.os_error.strerror or error.os_error}"
            raise (PeerDownError if is_away else PeerError)(to.name, why, was_sent=False) from None
        # RuntimeError: all connections were closed meanwhile.
        except (aiohttp.ClientError, OSError, ValueError, RuntimeError) as error:
            raise PeerError(to.name, f"it broke off: {error or type(error).__name__}") from None
