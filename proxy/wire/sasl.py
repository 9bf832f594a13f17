"""Who a client is, as far as its SASL exchange with the broker shows it.

The broker decides; a name counts only once the broker's last answer says that it is so. Passwords
and tokens are read and dropped within one call. Whoever can connect may send what is read here: its
length is bounded, and the parts of it before they are taken apart, so that no message takes more
than some milliseconds.
"""

import base64
import json
import re
import struct
from collections import deque
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from proxy.wire.apis import APIS, SASL_AUTHENTICATE, SASL_HANDSHAKE, is_known
from proxy.wire.frames import MalformedFrame, MalformedResponse, RequestHead, response_body_start
from proxy.wire.layout import Buffer

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

_PLAIN = "PLAIN"
_OAUTHBEARER = "OAUTHBEARER"
_SCRAM_DONE = b"v="  # the server's last SCRAM message starts so (RFC 5802)

MAX_UNREAD_BYTES = 512 * 1024
"""The longest SASL request; Kafka's own limit (sasl.server.max.receive.size). For what is not read
here, such as GSSAPI's tokens: those of a user in many groups have 64 KiB and more."""

MAX_READ_BYTES = 16 * 1024
"""The longest SaslAuthenticate request of a mechanism that names the user: PLAIN, SCRAM."""

MAX_BEARER_BYTES = 64 * 1024
"""The same of OAUTHBEARER, whose token may hold the user's groups."""

MAX_PAIRS = 64
"""Extensions in one message. Kafka's clients send one or two."""

MAX_CLAIM_PARTS = 6000
"""Members, elements and commas in a token's claims: the longest token has as many if it names
groups as LDAP does, with five commas in 50 bytes."""

_BEARER_ERROR_READ = b"\1"
"""What an OAUTHBEARER client says to a server's reason for a refusal (RFC 7628). Kafka then ends
the login, and never accepts it."""

_Claim: TypeAlias = tuple[str | None, str | None]
"""What a SaslAuthenticate request in flight claims: the mechanism, and the user's name."""


@dataclass(slots=True, eq=False)
class SaslExchange:
    """Follows one connection's SaslHandshake and SaslAuthenticate requests and their responses.

    Other APIs are ignored, so every request and response may be shown. Responses have to come in
    the order of their requests, as they do on the wire.
    """

    mechanism: str | None = None
    """As the client's last handshake named it, in capitals; None before the first."""
    principal: str | None = None
    """Name of the user the broker has accepted; None before, and where the exchange does not tell
    it (GSSAPI, delegation tokens)."""
    is_raw: bool = field(default=False, repr=False)
    """A version 0 handshake was seen: what follows are bare tokens without Kafka headers, which
    cannot be followed. Such a connection has to be refused."""
    _begun: bool = field(default=False, repr=False)
    """The current login's first message was seen, which names the user."""
    _name: str | None = field(default=None, repr=False)
    _claims: deque[_Claim] = field(default_factory=deque, repr=False)

    def max_bytes(self, api_key: int) -> int:
        """Return how long the next request of this API may be."""
        if api_key != SASL_AUTHENTICATE:
            return MAX_UNREAD_BYTES
        if self.mechanism == _OAUTHBEARER:
            return MAX_BEARER_BYTES
        is_read = self.mechanism == _PLAIN or _is_scram(self.mechanism)
        return MAX_READ_BYTES if is_read else MAX_UNREAD_BYTES

    def request(self, head: RequestHead, frame: Buffer) -> None:
        """Take a whole request frame.

        Raises MalformedFrame, also for a login that Kafka would refuse or whose user is not
        certain: it must not reach the broker.
        """
        if head.api_key == SASL_HANDSHAKE:
            self.is_raw |= head.api_version == 0
            self.mechanism = str(_decode_request(head, frame).mechanism or "").upper()
            self._begun = False
        elif head.api_key == SASL_AUTHENTICATE:
            if self.mechanism is not None:
                auth_bytes = _decode_request(head, frame).auth_bytes or b""
                if not (self._begun and _is_scram(self.mechanism)):
                    self._name = _claimed_name(self.mechanism, auth_bytes)
                    self._begun = True
            self._claims.append((self.mechanism, self._name))

    def response(self, api_key: int, version: int, frame: bytes) -> None:
        """Take a whole response frame to one of the requests shown. Raises MalformedResponse."""
        if api_key != SASL_AUTHENTICATE or not self._claims:
            return
        mechanism, name = self._claims.popleft()
        message = _decode_response(api_key, version, frame)
        if message.error_code != 0:
            self._begun = False
        elif _is_final(mechanism, message.auth_bytes or b""):
            self._begun = False
            self.principal = self.principal if name is None else name


def _is_scram(mechanism: str | None) -> bool:
    return (mechanism or "").startswith("SCRAM-")


def _is_final(mechanism: str | None, auth_bytes: bytes) -> bool:
    """Return whether a server message without error ends the exchange.

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
    body = frame[response_body_start(api_key, version, frame) :]
    try:
        return APIS[api_key].response.decode(body, version=version)
    except (ValueError, IndexError, struct.error) as error:
        raise MalformedResponse(f"a SASL response: {error}") from None


_PLAIN_PARTS = 3
_JWT_PARTS = 3
_BASE64_QUANTUM = 4

# Possessive: nothing that follows may stand in a name or value, so there is no other way to match.
_SASL_NAME = rb"(?:[\x01-\x2b\x2d-\x3c\x3e-\x7f]++|=2C|=3D)++"
_SCRAM_VALUE = rb"[\x01-\x2b\x2d-\x7f]++"

_SCRAM_FIRST = re.compile(
    rb"n,(?:a=(?P<authzid>" + _SASL_NAME + rb"))?,"
    rb"(?:m=" + _SCRAM_VALUE + rb",)?"
    rb"n=(?P<name>" + _SASL_NAME + rb"),"
    rb"r=[\x21-\x2b\x2d-\x7e]+"
    rb"(?P<extensions>(?:,[A-Za-z]+=" + _SCRAM_VALUE + rb")*)"
)
_BEARER_FIRST = re.compile(
    rb"n,(?:a=(?P<authzid>" + _SASL_NAME + rb"))?,\x01"
    rb"(?P<pairs>(?:[A-Za-z]+=[\x20-\x7e\t\r\n]+\x01)*)\x01"
)
_BEARER_AUTH = re.compile(rb"(?P<scheme>\w+) +(?P<token>[-\w~+/.]+=*)")

_URL_SAFE_BASE64 = bytes.maketrans(b"-_", b"+/")
_TRIMMED = "".join(map(chr, range(0x21)))  # what Java's String.trim takes away


def plain_name(message: bytes) -> str:
    """Read `authzid NUL authcid NUL password` (RFC 4616); ValueError when it is refused.

    Java would put a replacement character for what is not UTF-8, and how many differs by reader.
    """
    parts = message.split(b"\0")
    if len(parts) != _PLAIN_PARTS:
        raise ValueError(f"{len(parts)} parts instead of {_PLAIN_PARTS}")
    authzid, name, password = parts
    if not name or not password:
        raise ValueError("an empty name or password")
    _require_same(authzid, name)
    return name.decode()


def scram_name(message: bytes) -> str | None:
    """Read `n,,n=user,r=nonce` (RFC 5802); ValueError when it is refused.

    None with `tokenauth=true`: the name is then a delegation token's id, whose owner only the
    broker knows.
    """
    _require_few(message, b"=", MAX_PAIRS)
    found = _SCRAM_FIRST.fullmatch(message)
    if found is None:
        raise ValueError("not what Kafka takes")
    name = found["name"].replace(b"=2C", b",").replace(b"=3D", b"=")
    _require_same(found["authzid"], name)
    extensions = _pairs(found["extensions"].removeprefix(b","), b",")
    return None if extensions.get(b"tokenauth", b"").lower() == b"true" else name.decode()


def bearer_name(message: bytes) -> str | None:
    """Read the subject of the JSON web token in an OAUTHBEARER message (RFC 7628).

    ValueError when it is refused. None for a token of another form, or without `sub`: only a broker
    that is set up for such tokens takes it, and it alone knows the user.
    """
    _require_few(message, b"\1", MAX_PAIRS)
    found = _BEARER_FIRST.fullmatch(message)
    if found is None:
        raise ValueError("not what Kafka takes")
    pairs = _pairs(found["pairs"].removesuffix(b"\1"), b"\1")
    auth = _BEARER_AUTH.fullmatch(pairs.get(b"auth", b""))
    if auth is None or auth["scheme"].lower() != b"bearer":
        raise ValueError("no bearer token")
    name = _subject(auth["token"])
    if name is not None:
        _require_same(found["authzid"], name.encode())
    return name


def _subject(token: bytes) -> str | None:
    """Return the claim `sub`, None if there is none.

    Raises ValueError where readers of JSON could differ over it.
    """
    parts = token.split(b".")
    if len(parts) != _JWT_PARTS:  # opaque, or encrypted
        return None
    if parts[2].endswith(b"="):  # no JSON web token is padded (RFC 7515, 2)
        raise ValueError("a token whose signature is padded")
    payload = parts[1].translate(_URL_SAFE_BASE64)
    payload += b"=" * (-len(payload) % _BASE64_QUANTUM)
    try:
        content = base64.b64decode(payload, validate=True)
        _require_few(content, b"{[,", MAX_CLAIM_PARTS)
        claims = json.loads(content.decode(), object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError):
        raise ValueError("the token's claims can't be read") from None  # its text stays unseen
    if isinstance(claims, dict) and "sub" not in claims:
        return None
    subject = claims["sub"] if isinstance(claims, dict) else None
    if not isinstance(subject, str) or not subject:
        raise ValueError("a token without subject")
    if subject.strip(_TRIMMED) != subject:
        raise ValueError("a subject with space around it, which Kafka may take away")
    subject.encode()  # no half of a surrogate pair, which JSON can write
    return subject


def _require_few(data: bytes, marks: bytes, most: int) -> None:
    """Refuse more parts than anybody needs, by the bytes that each of them begins or ends with."""
    if len(data) - len(data.translate(None, marks)) > most:
        raise ValueError(f"more than {most} parts")


def _pairs(data: bytes, separator: bytes) -> dict[bytes, bytes]:
    """Split `key=value` pairs. Raises ValueError for a key that comes twice."""
    parts = (pair.partition(b"=") for pair in data.split(separator))
    return _without_doubles([(key, value) for key, _, value in parts])


def _without_doubles(pairs: list[tuple[_Key, _Value]]) -> dict[_Key, _Value]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key comes twice")
    return found


def _require_same(authzid: bytes | None, name: bytes) -> None:
    """Refuse to act for another user, as Kafka does."""
    if authzid and authzid != name:
        raise ValueError("an authorization id that is not the name")
