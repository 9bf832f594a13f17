"""Who a client is, as far as its SASL exchange with the broker shows it.

The broker decides; a name counts only once the broker's last answer says that it is so. Passwords
and tokens are read and dropped within one call.
"""

import base64
import binascii
import json
import struct
from collections import deque
from dataclasses import dataclass
from typing import Any

from proxy.wire.apis import APIS, SASL_AUTHENTICATE, SASL_HANDSHAKE, is_known
from proxy.wire.errors import MalformedFrame, MalformedResponse
from proxy.wire.frames import RequestHead, response_body
from proxy.wire.varint import Buffer

_SCRAM_DONE = b"v="
"""The server's last SCRAM message starts so (RFC 5802)."""

_PLAIN_PARTS = 3
_JWT_PARTS = 3
_BASE64_QUANTUM = 4


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

    __slots__ = ("_claims", "_name", "is_raw", "mechanism", "principal")

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
        self._name: str | None = None
        self._claims: deque[_Claim] = deque()

    def __repr__(self) -> str:
        return f"SaslExchange(mechanism={self.mechanism!r}, principal={self.principal!r})"

    def request(self, head: RequestHead, frame: Buffer) -> None:
        """Take a whole request frame. Raises MalformedFrame."""
        if head.api_key == SASL_HANDSHAKE:
            if head.api_version == 0:
                self.is_raw = True
            message = _decode_request(head, frame)
            self.mechanism = str(message.mechanism or "").upper()
            self._name = None
        elif head.api_key == SASL_AUTHENTICATE:
            if self.mechanism is None:
                self._claims.append(_Claim(None, None))
                return
            auth_bytes = _decode_request(head, frame).auth_bytes or b""
            if not _is_scram(self.mechanism) or self._name is None:
                self._name = _claimed_name(self.mechanism, auth_bytes)
            self._claims.append(_Claim(self.mechanism, self._name))

    def response(self, api_key: int, version: int, frame: bytes) -> None:
        """Take a whole response frame to one of the requests shown. Raises MalformedResponse."""
        if api_key != SASL_AUTHENTICATE or not self._claims:
            return
        claim = self._claims.popleft()
        message = _decode_response(api_key, version, frame)
        if message.error_code != 0:
            self._name = None
        elif claim.name is not None and _is_final(claim.mechanism, message.auth_bytes or b""):
            self.principal = claim.name
            self._name = None


def _is_scram(mechanism: str | None) -> bool:
    return mechanism is not None and mechanism.startswith("SCRAM-")


def _is_final(mechanism: str | None, auth_bytes: bytes) -> bool:
    """Say whether a server message without error ends the exchange.

    An OAUTHBEARER server that refuses a token first says why in a message without error code.
    """
    return auth_bytes.startswith(_SCRAM_DONE) if _is_scram(mechanism) else not auth_bytes


def _claimed_name(mechanism: str, auth_bytes: bytes) -> str | None:
    """Return the user that a client's first message names, None when it does not."""
    try:
        if mechanism == "PLAIN":
            return _plain_name(auth_bytes.decode())
        if _is_scram(mechanism):
            return _scram_name(auth_bytes.decode())
        if mechanism == "OAUTHBEARER":
            return _bearer_name(auth_bytes.decode())
    except (UnicodeDecodeError, binascii.Error, ValueError, RecursionError):
        return None
    return None


def _plain_name(message: str) -> str | None:
    """Read `authzid NUL authcid NUL password` (RFC 4616)."""
    parts = message.split("\0")
    return (parts[1] or None) if len(parts) == _PLAIN_PARTS else None


def _scram_name(message: str) -> str | None:
    """Read `n,,n=user,r=nonce` with `,` and `=` escaped in the name (RFC 5802).

    With `tokenauth=true` the name is a delegation token's id, whose owner only the broker knows.
    """
    attributes = message.split(",")
    if "tokenauth=true" in attributes:
        return None
    for attribute in attributes[1:]:
        if attribute.startswith("n="):
            return attribute[2:].replace("=2C", ",").replace("=3D", "=") or None
    return None


def _bearer_name(message: str) -> str | None:
    """Read the subject of the JSON web token in an OAUTHBEARER message (RFC 7628)."""
    for part in message.split("\1"):
        scheme, _, token = part.removeprefix("auth=").partition(" ")
        if part.startswith("auth=") and scheme.lower() == "bearer":
            pieces = token.split(".")
            if len(pieces) != _JWT_PARTS:
                return None
            payload = pieces[1] + "=" * (-len(pieces[1]) % _BASE64_QUANTUM)
            claims = json.loads(base64.urlsafe_b64decode(payload))
            subject = claims.get("sub") if isinstance(claims, dict) else None
            return subject if isinstance(subject, str) and subject else None
    return None


def _decode_request(head: RequestHead, frame: Buffer) -> Any:
    if not is_known(head.api_key, head.api_version):
        raise MalformedFrame("bad_body", f"no schema for SASL version {head.api_version}")
    body = bytes(frame[head.header_end : head.frame_bytes])
    try:
        return APIS[head.api_key].request.decode(body, version=head.api_version)
    except (ValueError, IndexError, struct.error) as error:
        raise MalformedFrame("bad_body", f"a SASL request: {type(error).__name__}") from None


def _decode_response(api_key: int, version: int, frame: bytes) -> Any:
    body = frame[response_body(api_key, version, frame) :]
    try:
        return APIS[api_key].response.decode(body, version=version)
    except (ValueError, IndexError, struct.error) as error:
        raise MalformedResponse(f"a SASL response: {error}") from None
