"""Reads and writes long JSON in small steps: nothing else runs during one call for megabytes."""

import json
from collections.abc import Iterator
from functools import partial
from json.decoder import JSONArray, JSONObject  # type: ignore[attr-defined]
from typing import Any

_scan_at_once = json.JSONDecoder().scan_once  # type: ignore[attr-defined]

ROW_DEPTH = 2  # of the rows of the lists in a document


def read_whole(body: bytes, depth: int) -> Any:
    """Return a document, read in steps: each value at `depth` below its top, or deeper, is one.

    With 2, each item of the lists that the document has is a step. For a thread: between two steps
    the event loop may run. Raises ValueError for what is no JSON, RecursionError for what is nested
    too deeply.
    """
    decoder = json.JSONDecoder()
    decoder.scan_once = partial(_scan, depth)  # type: ignore[attr-defined]
    return decoder.decode(body.decode())


def _scan(depth: int, text: str, at: int) -> tuple[Any, int]:
    """Read the value that begins there; return it, and where it ends.

    In Python down to `depth`, as the decoder does without its part in C.
    """
    scan = partial(_scan, depth - 1)
    match text[at : at + 1]:
        case "[" if depth:
            array: tuple[Any, int] = JSONArray((text, at + 1), scan)
            return array
        case "{" if depth:
            members: tuple[Any, int] = JSONObject((text, at + 1), True, scan, None, None)
            return members
    value: tuple[Any, int] = _scan_at_once(text, at)
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
