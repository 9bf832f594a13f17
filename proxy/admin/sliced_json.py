"""Reads and writes long JSON in small steps: nothing else runs during one call for megabytes."""

import json
import re
from collections.abc import Callable, Generator, Iterator
from typing import Any

ReadingSteps = Generator[None, None, Any]
"""Yields after each small step, and returns the value."""

_SPACE = re.compile(r"[ \t\n\r]*")
_decode = json.JSONDecoder().raw_decode

ROW_DEPTH = 2
"""Of the rows of the lists in a document."""


def reading(text: str, depth: int) -> ReadingSteps:
    """Read a document, each value at `depth` below its top, or deeper, in one step.

    With 2, each item of the lists that the document has is one step. Raises ValueError for what is
    no JSON, RecursionError for what is nested too deeply.
    """
    value, end = yield from _value(text, _skip(text, 0), depth)
    if _skip(text, end) != len(text):
        raise ValueError("there is more behind the end")
    return value


def read_whole(body: bytes, depth: int) -> Any:
    """Return a document. For a thread: between two steps the event loop may run."""
    steps = reading(body.decode(), depth)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def written_pieces(value: Any, depth: int) -> Iterator[str]:
    """Yield the text that `json.dumps` gives, each value at `depth` below the top by itself."""
    if depth and isinstance(value, dict):
        yield "{"
        for number, (key, member) in enumerate(value.items()):
            yield f"{', ' if number else ''}{json.dumps(key)}: "
            yield from written_pieces(member, depth - 1)
        yield "}"
    elif depth and isinstance(value, list):
        yield "["
        for number, item in enumerate(value):
            if number:
                yield ", "
            yield from written_pieces(item, depth - 1)
        yield "]"
    else:
        yield json.dumps(value)


def _value(text: str, start: int, depth: int) -> Generator[None, None, tuple[Any, int]]:
    opening = text[start : start + 1]
    if depth and opening == "{":
        return (yield from _object(text, start, depth))
    if depth and opening == "[":
        return (yield from _list(text, start, depth))
    found = _decode(text, start)
    yield
    return found


def _object(text: str, start: int, depth: int) -> Generator[None, None, tuple[Any, int]]:
    members: dict[str, Any] = {}

    def member(at: int) -> Generator[None, None, int]:
        key, end = _decode(text, at)
        if not isinstance(key, str):
            raise ValueError(f"{at}: a key is no string")
        at = _skip(text, _after(text, _skip(text, end), ":"))
        members[key], end = yield from _value(text, at, depth - 1)
        return end

    end = yield from _items(text, start, "}", member)
    return members, end


def _list(text: str, start: int, depth: int) -> Generator[None, None, tuple[Any, int]]:
    items: list[Any] = []

    def item(at: int) -> Generator[None, None, int]:
        value, end = yield from _value(text, at, depth - 1)
        items.append(value)
        return end

    end = yield from _items(text, start, "]", item)
    return items, end


def _items(
    text: str, start: int, closing: str, item: Callable[[int], Generator[None, None, int]]
) -> Generator[None, None, int]:
    """Read what stands between two brackets; return the position behind the second one."""
    at = _skip(text, start + 1)
    if text[at : at + 1] == closing:
        return at + 1
    while True:
        end = yield from item(at)
        at = _skip(text, end)
        if text[at : at + 1] == closing:
            return at + 1
        at = _skip(text, _after(text, at, ","))


def _after(text: str, at: int, expected: str) -> int:
    if text[at : at + 1] != expected:
        raise ValueError(f"{at}: {expected!r} is missing")
    return at + 1


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None  # it matches nothing as well
    return found.end()
