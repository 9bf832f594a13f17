"""The files of the status page, as the admin port serves them."""

from functools import partial
from importlib.resources import files

from aiohttp import web

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


def page_routes() -> list[web.RouteDef]:
    """Read the files of the status page once and return their routes."""
    return [
        web.get(path, partial(_give, (_FOLDER / name).read_text("utf-8"), content_type))
        for path, (name, content_type) in PAGE_FILES.items()
    ]


async def _give(text: str, content_type: str, _: web.Request) -> web.Response:
    return web.Response(text=text, content_type=content_type, charset="utf-8", headers=PAGE_HEADERS)
