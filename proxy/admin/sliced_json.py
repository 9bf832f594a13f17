"""Reads and writes long JSON in small steps: nothing else runs during one call for megabytes."""

import json
import re
from collections.abc import Iterator
from typing import Any

_SPACE = re.compile(r"[ \t\n\r]*")
_decode = json.JSONDecoder().raw_decode

ROW_DEPTH = 2
"""Of the rows of the lists in a document."""


def read_whole(body: bytes, depth: int) -> Any:
    """Return a document, read in steps: each value at `depth` below its top, or deeper, is one.

    With 2, each item of the lists that the document has is a step. For a thread: between two steps
    the event loop may run. Raises ValueError for what is no JSON, RecursionError for what is nested
    too deeply.
    """
    text = body.decode()
    value, end = _value(text, _skip(text, 0), depth)
    if _skip(text, end) != len(text):
        raise ValueError("there is more behind the end")
    return value


def written_pieces(value: Any, depth: int = ROW_DEPTH) -> Iterator[str]:
    """Yield the text that `json.dumps` gives, each value at `depth` below the top by itself.

    An iterator is written as a list, so that of thousands of items none is kept.
    """
    if depth and isinstance(value, dict):
        yield "{"
        for number, (key, member) in enumerate(value.items()):
            yield f"{', ' if number else ''}{json.dumps(key)}: "
            yield from written_pieces(member, depth - 1)
        yield "}"
    elif depth and isinstance(value, list | Iterator):
        yield "["
        for number, item in enumerate(value):
            if number:
                yield ", "
            yield from written_pieces(item, depth - 1)
        yield "]"
    else:
        yield json.dumps(value)


def _value(text: str, at: int, depth: int) -> tuple[Any, int]:
    """Read the value that begins there; return it, and where it ends."""
    opening = text[at : at + 1]
    if not depth or opening not in ("{", "["):
        return _decode(text, at)
    is_object = opening == "{"
    found: Any = {} if is_object else []
    closing = "}" if is_object else "]"
    at = _skip(text, at + 1)
    if text[at : at + 1] == closing:
        return found, at + 1
    while True:
        key = None
        if is_object:
            key, at = _decode(text, at)
            if not isinstance(key, str):
                raise ValueError(f"{at}: a key is no string")
            at = _skip_mark(text, at, ":")
        value, at = _value(text, at, depth - 1)
        if is_object:
            found[key] = value
        else:
            found.append(value)
        at = _skip(text, at)
        if text[at : at + 1] == closing:
            return found, at + 1
        at = _skip_mark(text, at, ",")


def _skip_mark(text: str, at: int, mark: str) -> int:
    at = _skip(text, at)
    if text[at : at + 1] != mark:
        raise ValueError(f"{at}: {mark!r} is missing")
    return _skip(text, at + 1)


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None  # it matches nothing as well
    return found.end()
