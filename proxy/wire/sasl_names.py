"""Whom a client's first SASL message names, read as the broker reads it.

A message may be written so that two readers find different names in it. So the patterns are those
of Kafka's own servers, and what they do not match, or what could be read in another way as well, is
refused: a client must not be charged to another user, nor to none.
"""

import base64
import json
import re
from typing import Any

_PLAIN_PARTS = 3
_JWT_PARTS = 3
_BASE64_QUANTUM = 4

_SASL_NAME = rb"(?:[\x01-\x2b\x2d-\x3c\x3e-\x7f]|=2C|=3D)+"
_SCRAM_VALUE = rb"[\x01-\x2b\x2d-\x7f]+"

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

_TRIMMED = "".join(map(chr, range(0x21)))
"""What Java's String.trim takes away."""


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
    found = _BEARER_FIRST.fullmatch(message)
    if found is None:
        raise ValueError("not what Kafka takes")
    auth = _BEARER_AUTH.fullmatch(
        _pairs(found["pairs"].removesuffix(b"\1"), b"\1").get(b"auth", b"")
    )
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
    payload = parts[1].translate(_URL_SAFE_BASE64)
    payload += b"=" * (-len(payload) % _BASE64_QUANTUM)
    try:
        text = base64.b64decode(payload, validate=True).decode()
        claims = json.loads(text, object_pairs_hook=_without_doubles)
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


def _pairs(data: bytes, separator: bytes) -> dict[bytes, bytes]:
    """Split `key=value` pairs. Raises ValueError for a key that comes twice."""
    pairs = [pair.partition(b"=") for pair in data.split(separator)]
    found = {key: value for key, _, value in pairs}
    if len(found) != len(pairs):
        raise ValueError("a key comes twice")
    return found


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a claim comes twice")
    return found


def _require_same(authzid: bytes | None, name: bytes) -> None:
    """Refuse to act for another user, as Kafka does."""
    if authzid and authzid != name:
        raise ValueError("an authorization id that is not the name")
