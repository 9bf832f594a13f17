"""The files of the status page, as the admin port serves them."""

from collections.abc import Awaitable, Callable
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

_SCRIPTS = (
    *("page", "clients", "unbounded", "queries", "partitions", "pipelines", "batches", "times"),
    *("ask", "rows", "section", "chart", "format", "changes", "connections", "members"),
)

PAGE_FILES = {
    "/": ("index.html", "text/html"),
    "/page/page.css": ("page.css", "text/css"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
    **{f"/page/{name}.js": (f"{name}.js", "text/javascript") for name in _SCRIPTS},
}
"""File and content type by path. A closed list: no path of a request reaches the file system."""


def page_routes() -> list[web.RouteDef]:
    """Read the files of the status page once and return their routes."""
    folder = files("proxy.admin") / "page"
    return [
        web.get(path, _file((folder / name).read_text("utf-8"), content_type))
        for path, (name, content_type) in PAGE_FILES.items()
    ]


def _file(text: str, content_type: str) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def give(_: web.Request) -> web.Response:
        return web.Response(
            text=text, content_type=content_type, charset="utf-8", headers=PAGE_HEADERS
        )

    return give
