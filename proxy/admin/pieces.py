"""Writes long JSON answers piece by piece: nothing else runs during one json.dumps."""

import json
from collections.abc import Iterator, Mapping

from aiohttp import web

from proxy.admin.errors import HEADERS
from proxy.slices import Slices


async def answer_in_slices(document: Mapping[str, object], slices: Slices) -> web.Response:
    """Return a document as a JSON answer."""
    text = "".join(await slices.collect(pieces(document)))
    return web.Response(text=text, content_type="application/json", headers=HEADERS)


def pieces(document: Mapping[str, object]) -> Iterator[str]:
    """Yield the text that `json.dumps` gives, each item of the document's lists by itself."""
    yield "{"
    for number, (key, value) in enumerate(document.items()):
        yield f"{', ' if number else ''}{json.dumps(key)}: "
        if isinstance(value, list):
            yield "["
            for index, item in enumerate(value):
                yield f"{', ' if index else ''}{json.dumps(item)}"
            yield "]"
        else:
            yield json.dumps(value)
    yield "}"
