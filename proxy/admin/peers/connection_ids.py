"""Tells the connections of several machines apart: each machine numbers its own.

In a tier an id is MACHINE/N. They are in the order of their numbers, then of their machines.
"""

from typing import Any

from aiohttp import web

from metrics.member_names import machine_of
from proxy.admin.api import CONNECTIONS_PATH, MAX_CONNECTION_NUMBER, tail_of
from proxy.admin.peers.member_requests import target_of
from proxy.admin.peers.merging.member_documents import MEMBER
from proxy.admin.replies import ApiError, parse_number


def show_machines(document: dict[str, Any]) -> dict[str, Any]:
    """Return a document with the machine before the id of each of its connections."""
    rows = [
        {**row, "id": f"{machine_of(row[MEMBER])}/{row['id']}"} for row in document["connections"]
    ]
    return {**document, "connections": rows}


def after_at(request: web.Request, machine: str) -> str:
    """Return the request's path and query as a machine is asked, with an `after` of its own.

    Raises ApiError with 400 for an `after` that is no id.
    """
    text = request.query["after"]
    of, _, digits = text.rpartition("/")
    number = parse_number(digits)
    if number is None:
        fix = f"write MACHINE/N, or 0 to {MAX_CONNECTION_NUMBER}"
        raise ApiError(400, f"after: {text!r} is no id of a connection", fix)
    if of and machine > of:  # its connection with the same number comes behind
        number = max(number - 1, 0)
    return str(request.rel_url.update_query(after=str(number)))


def closed_at(request: web.Request) -> tuple[str, str]:
    """Return the machine of the connection that is to be closed, and what it is asked for there.

    Raises ApiError with 404 for an id without a machine.
    """
    name = tail_of(request, CONNECTIONS_PATH)
    machine, _, number = name.rpartition("/")
    if not machine:
        fix = "write MACHINE/N; see GET /v1/connections for those that are open"
        raise ApiError(404, f"no connection {name!r} is open: each machine has its own", fix)
    _, question_mark, query = target_of(request).partition("?")
    return machine, f"{CONNECTIONS_PATH}{number}{question_mark}{query}"
