"""Serves the status page's own files, and nothing else, from the package."""

from collections.abc import Awaitable, Callable
from importlib.resources import files

from aiohttp import web

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "object-src 'none'"
    ),
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

FILES = {
    "/": ("index.html", "text/html"),
    "/page/page.css": ("page.css", "text/css"),
    "/page/page.js": ("page.js", "text/javascript"),
    "/page/clients.js": ("clients.js", "text/javascript"),
    "/page/unbounded.js": ("unbounded.js", "text/javascript"),
    "/page/queries.js": ("queries.js", "text/javascript"),
    "/page/partitions.js": ("partitions.js", "text/javascript"),
    "/page/pipelines.js": ("pipelines.js", "text/javascript"),
    "/page/batches.js": ("batches.js", "text/javascript"),
    "/page/ask.js": ("ask.js", "text/javascript"),
    "/page/rows.js": ("rows.js", "text/javascript"),
    "/page/section.js": ("section.js", "text/javascript"),
    "/page/chart.js": ("chart.js", "text/javascript"),
    "/page/format.js": ("format.js", "text/javascript"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
}
"""File and content type by path. A closed list: no path of a request reaches the file system."""


def page_routes() -> list[web.RouteDef]:
    """Read the files once and return their routes."""
    folder = files("proxy.admin") / "page"
    return [
        web.get(path, _file((folder / name).read_text("utf-8"), content_type))
        for path, (name, content_type) in FILES.items()
    ]


def _file(text: str, content_type: str) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def give(_: web.Request) -> web.Response:
        return web.Response(text=text, content_type=content_type, charset="utf-8", headers=HEADERS)

    return give
