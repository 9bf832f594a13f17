"""`quota-proxy tier`: who owns what in the tier of a running proxy, as a table or as JSON."""

from rich.console import Console, Group, RenderableType
from rich.text import Text

from proxy.admin.commands.admin_client import AdminAddress, fetch_document
from proxy.admin.commands.top import PLAIN_COLUMNS
from proxy.admin.commands.top_tables import ALARM, CALM, UNKNOWN, WARNING, Column, draw_table
from proxy.admin.peers.tier_routes import TIER_PATH
from proxy.state import Document

ANSWERS = {None: "is asked", True: "yes", False: "NO"}


def run_tier(address: AdminAddress, *, as_json: bool) -> None:
    """Print the tier as a machine of it knows it. Raises AdminRefusal."""
    tier = fetch_document(address, TIER_PATH, {"settled", "slots", "members", "machines"})
    console = Console()
    if as_json:
        console.print_json(data=tier)
        return
    if not console.is_terminal:
        console.width = PLAIN_COLUMNS
    console.print(tier_tables(tier, console.width))


def tier_tables(tier: Document, width: int) -> RenderableType:
    """Draw what `GET /v1/tier` gave, for a terminal `width` characters wide."""
    moving = sum(each["awaiting"] for each in tier["members"])
    state = "settled" if tier["settled"] else f"{moving} on their way"
    title = f"tier {tier['name']}  generation {tier['generation']}  slots {tier['slots']}, {state}"
    members = ((each, WARNING if each["releasing"] else CALM) for each in tier["members"])
    machines = ((each, _style(each)) for each in tier["machines"])
    tables = (draw_table(MEMBERS, members, width), "", draw_table(MACHINES, machines, width))
    return Group(Text(title), "", *tables)


def _style(machine: Document) -> str:
    return ALARM if machine["answers"] is False else WARNING if machine["problem"] else CALM


MEMBERS = (
    Column("member", lambda row: row["name"], ratio=2),
    Column("owns", lambda row: str(row["owned"]), justify="right"),
    Column("releases", lambda row: str(row["releasing"]), justify="right"),
    Column("gets", lambda row: str(row["awaiting"]), justify="right"),
    Column("load", lambda row: UNKNOWN if row["load"] is None else f"{row['load']:.0%}"),
)
MACHINES = (
    Column("machine", lambda row: row["name"], ratio=2),
    Column("answers", lambda row: ANSWERS[row["answers"]]),
    Column("clients may not reach it", lambda row: row["problem"] or UNKNOWN, ratio=3),
    Column("rules", lambda row: row["rules"][:12], 100),
    Column("admin", lambda row: row["admin_url"], 100, ratio=2),
)
