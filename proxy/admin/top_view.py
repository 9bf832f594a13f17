"""Draws the status document as tables for the terminal."""

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from proxy.admin.top_pipelines import COLUMNS as PIPELINE_COLUMNS
from proxy.admin.top_pipelines import held_nodes, pipeline_rows
from proxy.admin.top_queries import COLUMNS as QUERY_COLUMNS
from proxy.admin.top_queries import alarms, query_rows
from proxy.admin.top_table import Column, Document, make_table, printable
from proxy.quota.entities import QuotaKind

SPARKS = "▁▂▃▄▅▆▇█"
SPARK_COLUMNS = 24

ORDERS: dict[str, str] = {"h": "held", "n": "name", "r": "rate"}
"""By which key the table is sorted in which way."""

CLIENTS, QUERIES, PIPELINES = "clients", "queries", "pipelines"
VIEWS: dict[str, str] = {"c": CLIENTS, "s": QUERIES, "p": PIPELINES}
"""By which key which table is shown."""

NAMED_CLIENTS = 10
"""How many of the clients without a bound are named."""

_RATE_UNITS = ("B/s", "KiB/s", "MiB/s", "GiB/s")
_STEP = 1024.0
_KINDS = {
    QuotaKind.CONSUMER_BYTE_RATE: "consumer",
    QuotaKind.PRODUCER_BYTE_RATE: "producer",
    QuotaKind.REQUEST_PERCENTAGE: "requests",
}

_COLUMNS = (
    Column("client", ratio=3),
    Column("quota"),
    Column("rate", justify="right"),
    Column("bound", from_width=100, justify="right"),
    Column("of it", justify="right"),
    Column("last 10 min", from_width=150),
    Column("held in 1 min", justify="right"),
    Column("ends in", justify="right"),
    Column("rule", from_width=120, ratio=2),
)


def rate_text(value: float, unit: str) -> str:
    """Write a rate or a bound for people, in steps of 1024."""
    if unit == "percent":
        return f"{value:.1f} %"
    for name in _RATE_UNITS[:-1]:
        if value < _STEP:
            return f"{value:.4g} {name}"
        value /= _STEP
    return f"{value:.4g} {_RATE_UNITS[-1]}"


def in_order(clients: Sequence[Document], order: str) -> list[Document]:
    """Sort the clients by `held` (longest in the last minute), `name` or `rate` (of the bound)."""
    by_name = sorted(clients, key=lambda client: (client["entity"], client["quota"]))
    if order == "held":
        by_name.sort(key=lambda client: -float(client["held_s"]))
    elif order == "rate":
        by_name.sort(key=lambda client: -float(client["rate"] / client["bound"]))
    return by_name


def order_of(view: str, order: str) -> str:
    """Return how a table is sorted: other than clients only by name, or the urgent ones first."""
    return order if view == CLIENTS or order == "name" else "urgency"


def screen(
    status: Document,
    order: str,
    width: int,
    rows: int | None = None,
    views: Iterable[str] = (CLIENTS,),
) -> RenderableType:
    """Draw the whole view.

    Args:
        status: what `GET /v1/status` gave.
        order: a value of `ORDERS`.
        width: of the terminal, in characters; a narrow one shows fewer columns.
        rows: how many lines of a table fit; None for all.
        views: which tables: values of `VIEWS`.

    """
    draw = {CLIENTS: _clients, QUERIES: _queries, PIPELINES: _pipelines}
    tables = (part for view in views for part in ("", *draw[view](status, order, width, rows)))
    return Group(_head(status), *tables)


def _clients(
    status: Document, order: str, width: int, rows: int | None
) -> tuple[RenderableType, ...]:
    clients = in_order(status["clients"], order)
    shown = clients if rows is None else clients[: max(rows, 0)]
    lines = ((_cells(client), "yellow" if client["throttled"] else "") for client in shown)
    below = Text(f"{len(shown)} of {status['bounded']} clients under a quota", "dim")
    if status["unbounded"]:
        below.append(f"; {status['unbounded']} without a bound: {_names(status)}", "yellow")
    if rows is not None:
        below.no_wrap, below.overflow = True, "crop"
    return make_table(_COLUMNS, lines, width), below


def _names(status: Document) -> str:
    """Name some of the clients that no rule bounds."""
    clients = status["unbounded_clients"][:NAMED_CLIENTS]
    names = [printable(client["client_id"] or "(no client id)") for client in clients]
    return ", ".join(names) + (", ..." if len(names) < status["unbounded"] else "")


def _queries(
    status: Document, order: str, width: int, rows: int | None
) -> tuple[RenderableType, ...]:
    queries = list(status["queries"])
    if order_of(QUERIES, order) == "name":
        queries.sort(key=lambda query: str(query["name"]))
    shown = queries if rows is None else queries[: max(rows, 0)]
    below = f"{len(shown)} of {status['followed']} Spark queries"
    return make_table(QUERY_COLUMNS, query_rows(shown), width), Text(below, "dim")


def _pipelines(
    status: Document, order: str, width: int, rows: int | None
) -> tuple[RenderableType, ...]:
    pipelines = list(status["pipelines"])
    if order_of(PIPELINES, order) == "name":
        pipelines.sort(key=lambda pipeline: str(pipeline["name"]))
    lines = list(pipeline_rows(pipelines))
    shown = lines if rows is None else lines[: max(rows, 0)]
    left = len(lines) - len(shown)
    below = f"{len(pipelines)} of {status['pipelines_total']} pipelines, rates in records/s" + (
        f"; {left} lines do not fit" if left else ""
    )
    return make_table(PIPELINE_COLUMNS, shown, width), Text(below, "dim")


def _head(status: Document) -> Text:
    ready = status["ready"]
    state = "ready" if ready else f"NOT READY: {status['not_ready_reason']}"
    connections = sum(listener["connections"] for listener in status["listeners"])
    waiting = ", ".join(f"{api} {size}" for api, size in status["delay_queues"].items())
    alarmed = sum(bool(alarms(query)) for query in status["queries"])
    return Text.assemble(
        ("Kafka Quota Proxy ", "bold"),
        (printable(state), "green" if ready else "bold red"),
        f"  up {status['uptime_s']:.0f} s  connections {connections}  waiting {waiting}"
        f"  throttled {status['throttled']}",
        f"  queries {status['followed']}" if status["followed"] else "",
        (f" ({alarmed} in trouble)" if alarmed else "", "bold red"),
        f"  pipelines {status['pipelines_total']}" if status["pipelines_total"] else "",
        (f" ({held} held)" if (held := held_nodes(status["pipelines"])) else "", "yellow"),
        f"  {status['at']}",
    )


def _cells(client: Document) -> tuple[str, ...]:
    """Return one text for each of `_COLUMNS`."""
    unit, rate, bound, ends_s = (client[key] for key in ("unit", "rate", "bound", "hold_ends_in_s"))
    rule = client["rule"]
    return (
        client["entity"],
        _KINDS[QuotaKind(client["quota"])],
        rate_text(rate, unit),
        rate_text(bound, unit),
        f"{rate / bound:.0%}",
        _sparks(client["history"], bound),
        f"{client['holds']}x {client['held_s']:.1f} s" if client["holds"] else "-",
        "-" if ends_s is None else f"{ends_s:.2f} s",
        rule["place"] or rule["title"],
    )


def _sparks(history: Document | None, bound: float) -> str:
    """Draw the samples as bars; several samples to a bar show the highest of them."""
    rates = [] if history is None else history["rates"]
    per_bar = -(-len(rates) // SPARK_COLUMNS) or 1
    bars = [max(rates[start : start + per_bar]) for start in range(0, len(rates), per_bar)]
    top = max((*bars, bound))
    return "".join(SPARKS[round(bar / top * (len(SPARKS) - 1))] for bar in bars)
