"""Who a client is, as far as its SASL exchange with the broker shows it.

The broker decides; a name counts only once the broker's last answer says that it is so. Passwords
and tokens are read and dropped within one call.
"""

import struct
from collections import deque
from dataclasses import dataclass
from typing import Any

from proxy.wire.apis import APIS, SASL_AUTHENTICATE, SASL_HANDSHAKE, is_known
from proxy.wire.errors import MalformedFrame, MalformedResponse
from proxy.wire.frames import RequestHead, response_body
from proxy.wire.sasl_names import bearer_name, plain_name, scram_name
from proxy.wire.varint import Buffer

_PLAIN = "PLAIN"
_OAUTHBEARER = "OAUTHBEARER"

_SCRAM_DONE = b"v="
"""The server's last SCRAM message starts so (RFC 5802)."""

_BEARER_ERROR_READ = b"\1"
"""What an OAUTHBEARER client says to a server's reason for a refusal (RFC 7628). Kafka then ends
the login, and never accepts it."""


@dataclass(frozen=True, slots=True)
class _Claim:
    """What a SaslAuthenticate request in flight claims."""

    mechanism: str | None
    name: str | None


class SaslExchange:
    """Follows one connection's SaslHandshake and SaslAuthenticate requests and their responses.

    Other APIs are ignored, so every request and response may be shown. Responses have to come in
    the order of their requests, as they do on the wire.
    """

    __slots__ = ("_begun", "_claims", "_name", "is_raw", "mechanism", "principal")

    mechanism: str | None
    """As the client's last handshake named it, in capitals; None before the first."""

    principal: str | None
    """Name of the user the broker has accepted; None before, and where the exchange does not tell
    it (GSSAPI, delegation tokens)."""

    is_raw: bool
    """A version 0 handshake was seen: what follows are bare tokens without Kafka headers, which
    cannot be followed. Such a connection has to be refused."""

    def __init__(self) -> None:
        self.mechanism = None
        self.principal = None
        self.is_raw = False
        self._begun = False
        """The current login's first message was seen, which names the user."""
        self._name: str | None = None
        self._claims: deque[_Claim] = deque()

    def __repr__(self) -> str:
        return f"SaslExchange(mechanism={self.mechanism!r}, principal={self.principal!r})"

    def request(self, head: RequestHead, frame: Buffer) -> None:
        """Take a whole request frame.

        Raises MalformedFrame, also for a login that Kafka would refuse or whose user is not
        certain: it must not reach the broker.
        """
        if head.api_key == SASL_HANDSHAKE:
            if head.api_version == 0:
                self.is_raw = True
            message = _decode_request(head, frame)
            self.mechanism = str(message.mechanism or "").upper()
            self._begun = False
        elif head.api_key == SASL_AUTHENTICATE:
            if self.mechanism is None:
                self._claims.append(_Claim(None, None))
                return
            auth_bytes = _decode_request(head, frame).auth_bytes or b""
            if not (self._begun and _is_scram(self.mechanism)):
                self._name = _claimed_name(self.mechanism, auth_bytes)
                self._begun = True
            self._claims.append(_Claim(self.mechanism, self._name))

    def response(self, api_key: int, version: int, frame: bytes) -> None:
        """Take a whole response frame to one of the requests shown. Raises MalformedResponse."""
        if api_key != SASL_AUTHENTICATE or not self._claims:
            return
        claim = self._claims.popleft()
        message = _decode_response(api_key, version, frame)
        if message.error_code != 0:
            self._begun = False
        elif _is_final(claim.mechanism, message.auth_bytes or b""):
            self._begun = False
            if claim.name is not None:
                self.principal = claim.name


def _is_scram(mechanism: str | None) -> bool:
    return mechanism is not None and mechanism.startswith("SCRAM-")


def _is_final(mechanism: str | None, auth_bytes: bytes) -> bool:
    """Say whether a server message without error ends the exchange.

    An OAUTHBEARER server that refuses a token first says why in a message without error code.
    """
    return auth_bytes.startswith(_SCRAM_DONE) if _is_scram(mechanism) else not auth_bytes


def _claimed_name(mechanism: str, auth_bytes: bytes) -> str | None:
    """Return the user that a client's first message names.

    None for a mechanism that is not read, a delegation token, and a message that can't end in a
    login. Raises MalformedFrame where the name is not certain.
    """
    try:
        if mechanism == _PLAIN:
            return plain_name(auth_bytes)
        if _is_scram(mechanism):
            return scram_name(auth_bytes)
        if mechanism == _OAUTHBEARER and auth_bytes != _BEARER_ERROR_READ:
            return bearer_name(auth_bytes)
    except ValueError as error:
        reason = "not UTF-8" if isinstance(error, UnicodeError) else error
        raise MalformedFrame("bad_body", f"a login by {mechanism}: {reason}") from None
    return None


def _decode_request(head: RequestHead, frame: Buffer) -> Any:
    if not is_known(head.api_key, head.api_version):
        raise MalformedFrame("bad_body", f"no schema for SASL version {head.api_version}")
    body = bytes(frame[head.header_end : head.frame_bytes])
    try:
        message = APIS[head.api_key].request.decode(body, version=head.api_version)
        is_plain = bytes(message.encode(header=False, framed=False)) == body
    except (ValueError, TypeError, IndexError, struct.error) as error:
        raise MalformedFrame("bad_body", f"a SASL request: {type(error).__name__}") from None
    if not is_plain:  # bytes behind it, or a length in a form that others may read otherwise
        raise MalformedFrame("bad_body", "a SASL request that no codec writes")
    return message


def _decode_response(api_key: int, version: int, frame: bytes) -> Any:
    body = frame[response_body(api_key, version, frame) :]
    try:
        return APIS[api_key].response.decode(body, version=version)
    except (ValueError, IndexError, struct.error) as error:
        raise MalformedResponse(f"a SASL response: {error}") from None
