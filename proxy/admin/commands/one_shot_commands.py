"""The commands that ask a running proxy once, and print what it answers."""

import sys
from urllib.parse import quote, urlencode

from rich.console import Console, Group, RenderableType
from rich.text import Text

from proxy.admin.api import THROTTLING_PATH
from proxy.admin.client_documents import CONNECTION
from proxy.admin.commands.operator_commands import AdminAddress
from proxy.admin.commands.top_tables import (
    ALARM,
    CALM,
    WARNING,
    draw_table,
    print_wide,
    printable,
)
from proxy.admin.document_models import Column
from proxy.admin.peers.tier_routes import TIER_PATH
from proxy.admin.suggestions import SUGGESTIONS_PATH
from proxy.state import Document

ANSWERS = {None: "is asked", True: "yes", False: "NO"}


def run_connections(
    address: AdminAddress, text: str, limit: int, *, console: Console | None = None
) -> None:
    """Print up to `limit` connections with `text` in what names them, most traffic first.

    Raises AdminRefusal.
    """
    path = f"/v1/connections?{urlencode({'filter': text, 'limit': limit})}"
    document = address.document(path, {"connections", "total", "matching"})
    print_wide(lambda width: _connection_table(document, width), console)


def _connection_table(document: Document, width: int) -> RenderableType:
    rows = document["connections"]
    lines = ((each, WARNING if each["held"] else CALM) for each in rows)
    below = f"{len(rows)} of {document['matching']} connections"
    if document["matching"] < document["total"]:
        below += f" that fit, {document['total']} in all"
    table = draw_table(CONNECTION.columns, lines, width)
    return Group(table, Text(f"{below}; {document['held']} held", "dim"))


def run_tier(address: AdminAddress, *, as_json: bool) -> None:
    """Print the tier as a machine of it knows it. Raises AdminRefusal."""
    tier = address.document(TIER_PATH, {"settled", "slots", "members", "machines"})
    if as_json:
        Console().print_json(data=tier)
    else:
        print_wide(lambda width: tier_tables(tier, width))


def tier_tables(tier: Document, width: int) -> RenderableType:
    """Draw what `GET /v1/tier` gave, for a terminal `width` characters wide."""
    moving = sum(each["awaiting"] for each in tier["members"])
    state = "settled" if tier["settled"] else f"{moving} on their way"
    title = f"tier {tier['name']}  generation {tier['generation']}  slots {tier['slots']}, {state}"
    members = ((each, WARNING if each["releasing"] else CALM) for each in tier["members"])
    machines = ((each, _machine_style(each)) for each in tier["machines"])
    tables = (draw_table(MEMBERS, members, width), "", draw_table(MACHINES, machines, width))
    return Group(Text(title), "", *tables)


def _machine_style(machine: Document) -> str:
    return ALARM if machine["answers"] is False else WARNING if machine["problem"] else CALM


MEMBERS = (
    Column("member", "name", ratio=2),
    Column("owns", "owned", "count"),
    Column("releases", "releasing", "count"),
    Column("gets", "awaiting", "count"),
    Column("load", "load", "share"),
)
MACHINES = (
    Column("machine", "name", ratio=2),
    Column("answers", lambda row: ANSWERS[row["answers"]]),
    Column("clients may not reach it", "problem", ratio=3),
    Column("rules", lambda row: row["rules"][:12], from_width=100),
    Column("admin", "admin_url", from_width=100, ratio=2),
)


def change_throttling(address: AdminAddress, **change: object) -> None:
    """Pause quotas, or enforce them again, and print what is in force then.

    `change` has the keys of the body of `POST /v1/throttling`. Raises AdminRefusal.
    """
    key, body = "throttling", {key: value for key, value in change.items() if value is not None}
    throttling = address.document(THROTTLING_PATH, {key}, body)[key]
    lines = [
        f"paused: {each['selector']} until {each['until']}, {each['left_s']:,.0f} s left"
        for each in throttling["paused"]
    ]
    if not throttling["enforced"]:
        lines.append("no quota is enforced: throttle.enforce is false in the configuration")
    for line in lines or ["all quotas are enforced"]:
        sys.stdout.write(f"{printable(line)}\n")


def print_suggestions(address: AdminAddress, since: str) -> None:
    """Print rules that would fit what was observed, as YAML. Raises AdminRefusal."""
    path = f"{SUGGESTIONS_PATH}?since={quote(since, safe='')}"
    sys.stdout.write(address.document(path, {"yaml"})["yaml"])
