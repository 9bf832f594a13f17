"""The files of the status page, as the admin port serves them."""

import json
from functools import partial
from importlib.resources import files

from aiohttp import web

from proxy.admin.client_documents import CONNECTION
from proxy.admin.peers.merged_documents import MEMBER_ROW
from proxy.admin.progress_documents import PARTITION

PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "object-src 'none'"
    ),
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

_TYPES = {"css": "text/css", "svg": "image/svg+xml", "js": "text/javascript"}
_FOLDER = files("proxy.admin") / "page"

PAGE_FILES = {"/": ("index.html", "text/html")} | {
    f"/page/{file.name}": (file.name, _TYPES[suffix])
    for file in _FOLDER.iterdir()
    if (suffix := file.name.rpartition(".")[2]) in _TYPES
}
"""File and content type by path. A closed list: no path of a request reaches the file system."""


COLUMNS = {
    "connection": CONNECTION.columns,
    "member": MEMBER_ROW.columns,
    "partition": PARTITION.columns,
}
"""Of tables of the page, by the names that it has for them."""


def page_columns() -> str:
    """Return what the page has of them, as a module for it."""
    shown = {
        name: [(each.page, each.value, each.form, each.none) for each in columns if each.page]
        for name, columns in COLUMNS.items()
    }
    return f"export const COLUMNS = {json.dumps(shown)};\n"


def page_routes() -> list[web.RouteDef]:
    """Read the files of the status page once and return their routes."""
    texts = {
        path: ((_FOLDER / name).read_text("utf-8"), content_type)
        for path, (name, content_type) in PAGE_FILES.items()
    }
    texts["/page/columns.js"] = page_columns(), _TYPES["js"]
    return [web.get(path, partial(_give, *text)) for path, text in texts.items()]


async def _give(text: str, content_type: str, _: web.Request) -> web.Response:
    return web.Response(text=text, content_type=content_type, charset="utf-8", headers=PAGE_HEADERS)
