"""Pack documents into the bytes that Kafka's group protocol carries for us, and read them back."""

import json
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

USER_DATA_SCHEMA = 1
"""Of the documents. Kafka carries them for members of several versions during an upgrade."""

MAX_DOCUMENT_BYTES = 16 * 2**20
"""Unpacked. A map of 1,000 members takes some 300 KB; whoever may join must not fill our memory."""

_LEVEL = 9
"""The brokers keep what a group has in one record, so size counts more than the milliseconds."""

T = TypeVar("T")


class FormError(ValueError):
    """These bytes are none of ours, or of a form that this version does not know."""


def pack(document: dict[str, Any]) -> bytes:
    """Return a document with its form, as compressed JSON."""
    text = json.dumps({"form": USER_DATA_SCHEMA, **document}, separators=(",", ":"))
    return zlib.compress(text.encode(), _LEVEL)


def read_packed(data: bytes, make: Callable[[dict[str, Any]], T]) -> T:
    """Return what `make` makes of what was packed; raises FormError."""
    document = unpack(data)
    try:
        return make(document)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise FormError(f"not as a proxy writes it: {error!r}") from error


def unpack(data: bytes) -> dict[str, Any]:
    """Return what was packed; raises FormError."""
    try:
        unpacking = zlib.decompressobj()
        text = unpacking.decompress(data, MAX_DOCUMENT_BYTES)
        document = json.loads(text) if unpacking.eof else None
    except (zlib.error, ValueError, RecursionError) as error:
        raise FormError(f"not written by a proxy: {error}") from error
    if not isinstance(document, dict):
        raise FormError("not written by a proxy, cut off, or too long")
    if document.get("form") != USER_DATA_SCHEMA:
        found = f"of form {document.get('form')!r}, and this version reads form {USER_DATA_SCHEMA}"
        raise FormError(f"{found}: run versions that go together")
    return document
