"""Draws the status document as tables for the terminal."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from proxy.admin.document_models import FORMS, UNKNOWN, Column, printable, rate_text
from proxy.admin.pipeline_documents import NODE, is_node_held
from proxy.quota.entities import QuotaKind
from proxy.state import Document

SPARKS = "▁▂▃▄▅▆▇█"
SPARK_COLUMNS = 24
PLAIN_COLUMNS = 160  # how wide a view is where no terminal says so

ORDERS: dict[str, str] = {"h": "held", "n": "name", "r": "rate"}
"""By which key the table is sorted in which way."""

CLIENTS, QUERIES, PIPELINES = "clients", "queries", "pipelines"
VIEWS: dict[str, str] = {"c": CLIENTS, "s": QUERIES, "p": PIPELINES}
"""By which key which table is shown."""

NO_CLIENT_ID = "(no client id)"
NAME_PART = 2  # the middle of a name longer than this part of the width is left out
MIN_NAME = 48  # characters; but not of a shorter one, which is folded
LISTED_NAME = 40  # characters of a name among others
LEAST_LOAN = 0.05  # of a share: what is borrowed or lent below that is not shown
SECONDS_SHOWN = 60  # what is counted of a client reaches back a minute, or a little further
NAMED_CLIENTS = 10  # of those without a bound
FAILED = "failed"
ALARM, WARNING, HEAD, CALM = "bold red", "yellow", "bold", ""

_Drawn = tuple[RenderableType, ...]  # a table, and the line below it


def draw_view(
    status: Document,
    order: str,
    width: int,
    rows: int | None = None,
    views: Iterable[str] = (CLIENTS,),
) -> RenderableType:
    """Draw the view of `status`, of `GET /v1/status?by=client`, sorted by `order` of `ORDERS`.

    A narrow terminal (`width` in characters) shows fewer columns. At most `rows` lines of a table
    are shown, None for all. `views` are tables of `VIEWS`.
    """
    banners = [Text(_paused(status["throttling"]), ALARM), _scheduled(status["throttling"])]
    banners = [each for each in banners if each]
    rows = None if rows is None else max(rows - len(banners), 0)
    draw = {CLIENTS: _clients, QUERIES: _queries, PIPELINES: _pipelines}
    tables = (part for view in views for part in ("", *draw[view](status, order, width, rows)))
    for banner in () if rows is None else banners:
        banner.no_wrap, banner.overflow = True, "crop"
    return Group(_head(status), *banners, *tables)


def sorted_clients(quotas: Sequence[Document], order: str) -> list[list[Document]]:
    """Sort clients by `held` (longest in the last minute), `name` or `rate` (of the bound).

    Returns the quotas of each; that which counts most for a client decides where it is.
    """
    groups: dict[str, list[Document]] = {}
    for quota in quotas:
        groups.setdefault(quota["group"], []).append(quota)
    clients = sorted(groups.values(), key=_client_name)
    if order == "held":
        clients.sort(key=lambda each: -max(float(quota["held_s"]) for quota in each))
    elif order == "rate":
        clients.sort(key=lambda each: -max(quota["rate"] / quota["bound"] for quota in each))
    return clients


def order_in_force(view: str, order: str) -> str:
    """Return how a table is sorted: other than clients only by name, or the urgent ones first."""
    return order if view == CLIENTS or order == "name" else "urgency"


def print_at_width(draw: Callable[[int], RenderableType], console: Console | None = None) -> None:
    """Print what `draw` gives for the width of the terminal, or of PLAIN_COLUMNS without one."""
    console = console or Console()
    if not console.is_terminal:
        console.width = PLAIN_COLUMNS
    console.print(draw(console.width))


def elide_middle(text: str, most: int) -> str:
    """Leave out the middle of a text of more than so many characters."""
    if len(text) <= most:
        return text
    tail = (most - 1) // 2
    return f"{text[: most - 1 - tail]}…{text[-tail:]}"


def draw_table(
    columns: Sequence[Column], rows: Iterable[tuple[Document, str]], width: int
) -> Table:
    """Draw rows, each with a style."""
    table = Table(box=None, expand=True, pad_edge=False, header_style="bold")
    columns = [each for each in columns if width >= each.from_width]
    for each in columns:
        side: Literal["left", "right"] = "left" if each.form == "text" else "right"
        how: dict[str, Any] = {"no_wrap": each.ratio is None, "overflow": "fold"}
        table.add_column(each.title, ratio=each.ratio, justify=side, **how)
    most = max(width // NAME_PART, MIN_NAME)
    for row, style in rows:
        texts = ((column, printable(column.text(row))) for column in columns)
        cells = (elide_middle(text, most) if column.is_name else text for column, text in texts)
        # Text, not str: a client id must not be read as rich's markup.
        table.add_row(*map(Text, cells), style=style)
    return table


def _head(status: Document) -> Text:
    ready, warning = status["ready"], status.get("warning")
    state = "ready" if ready else f"NOT READY: {status['not_ready_reason']}"
    if ready and warning:
        state = f"ready, but {warning}"
    connections = sum(listener["connections"] for listener in status["listeners"])
    waiting = ", ".join(f"{api} {size}" for api, size in status["delay_queues"].items())
    alarmed = sum(bool(_alarms(query)) for query in status["queries"])
    pipelines = status["pipelines"]
    held = sum(
        is_node_held(node) for each in pipelines for node in (*each["sources"], *each["stages"])
    )
    return Text.assemble(
        ("Kafka Quota Proxy ", "bold"),
        (printable(state), ALARM if not ready else WARNING if warning else "green"),
        f"  up {status['uptime_s']:.0f} s  connections {connections}  waiting {waiting}"
        f"  throttled {status['client_counts']['throttled']}",
        f"  queries {status['followed']}" if status["followed"] else "",
        (f" ({alarmed} in trouble)" if alarmed else "", ALARM),
        f"  pipelines {status['pipelines_total']}" if status["pipelines_total"] else "",
        (f" ({held} held)" if held else "", WARNING),
        *_members(status),
        f"  {status['at']}",
    )


def _members(status: Document) -> Iterator[str | tuple[str, str]]:
    """Yield how many processes relay, on how many machines, and the names of those silent."""
    members, tier = status.get("members", ()), status.get("tier")
    if tier:
        machines = {each["machine"] for each in members}
        yield f"  tier {printable(tier['name'])}  machines {len(machines)}"
    if len(members) > 1:
        silent = [printable(each["name"]) for each in members if not each["answers"]]
        yield f"  members {len(members)}"
        yield (f" ({', '.join(silent)} silent)" if silent else "", ALARM)


def _paused(throttling: Document) -> str:
    """Name for whom quotas are not enforced; empty when they are for all."""
    if not throttling["enforced"]:
        return "QUOTAS ARE NOT ENFORCED: throttle.enforce is false"
    pauses = [
        f"{printable(each['selector'])} until {each['until']} ({each['left_s']:,.0f} s)"
        for each in throttling["paused"]
    ]
    return f"QUOTAS ARE PAUSED: {', '.join(pauses)}" if pauses else ""


def _scheduled(throttling: Document) -> Text:
    """Return which rules and budgets are in force until when, or begin; empty without any."""
    times = [
        printable(f"{each['selector']} {each['schedule']}") for each in throttling["scheduled"]
    ]
    return Text(f"schedules: {'; '.join(times)}" if times else "", "dim")


def _clients(status: Document, order: str, width: int, rows: int | None) -> _Drawn:
    budgets = status.get("budgets", ())
    lines = list(_by_budget(sorted_clients(status["clients"], order), budgets))
    shown, counts = lines[:rows], status["client_counts"]
    below = Text(f"{counts['shown']} of {counts['bounded']} clients under a quota", "dim")
    if counts["left"]:
        below.append(f", {counts['left']} have left")
    if len(shown) < len(lines):
        below.append(f"; {len(lines) - len(shown)} lines do not fit")
    if status["unbounded"]:
        clients = status["unbounded_clients"][:NAMED_CLIENTS]
        names = [_unbounded(client) for client in clients]
        names += ["..."] if len(names) < status["unbounded"] else []
        below.append(f"; {status['unbounded']} without a bound: {', '.join(names)}", WARNING)
    if rows is not None:
        below.no_wrap, below.overflow = True, "crop"
    columns = (*CLIENT_COLUMNS, BUDGET_COLUMN) if budgets else CLIENT_COLUMNS
    return draw_table(columns, shown, width), below


def _by_budget(
    clients: Sequence[Sequence[Document]], budgets: Sequence[Document]
) -> Iterator[tuple[Document, str]]:
    """Yield the rows of each budget with those of its clients below it, then the other clients'."""
    within: dict[str | None, list[Sequence[Document]]] = {each["name"]: [] for each in budgets}
    for quotas in clients:
        names = (quota["budget"] for quota in quotas if quota.get("budget") in within)
        within.setdefault(next(names, None), []).append(quotas)
    for name, inside in within.items():
        yield from (_budget_row(each) for each in budgets if each["name"] == name)
        for quotas in inside:
            yield from _client_rows(quotas, "" if name is None else "  ")


def _budget_row(budget: Document) -> tuple[Document, str]:
    unknown = dict.fromkeys(("history", "hold_ends_in_s", "rule"))
    title = f"budget {budget['name']}"
    return {**budget, **unknown, "title": title, "above_s": 0}, HEAD


def _client_name(quotas: Sequence[Document]) -> str:
    """Return what names a client: the entity that it is in all its quotas, or its own name."""
    if all(each["entity"] == quotas[0]["entity"] for each in quotas):
        return str(quotas[0]["entity"])
    clients = next((each["clients"] for each in quotas if each["clients"]), None)
    return (clients[0]["client_id"] if clients else None) or NO_CLIENT_ID


def _client_rows(quotas: Sequence[Document], indent: str) -> Iterator[tuple[Document, str]]:
    """Yield a row for each quota of a client, with its style; the first one names the client."""
    title = f"{indent}{_client_name(quotas)}"
    for quota in quotas:
        yield {**quota, "title": title}, WARNING if quota["throttled"] else CALM
        title = ""


def _unbounded(client: Document) -> str:
    name = elide_middle(printable(client["client_id"] or NO_CLIENT_ID), LISTED_NAME)
    return f"{name} ({rate_text(client['rate'])})" if client["rate"] else name


def _holds(client: Document) -> str:
    if not client["enforced"]:
        above_s = min(client["above_s"], SECONDS_SHOWN)
        return f"not enforced, {above_s} s above" if above_s else "not enforced"
    return f"{client['holds']}x {client['held_s']:.1f} s" if client["holds"] else UNKNOWN


def _rule(row: Document) -> str:
    return UNKNOWN if row["rule"] is None else str(row["rule"]["place"] or row["rule"]["title"])


def _sparks(client: Document) -> str:
    """Draw the samples as bars; several samples to a bar show the highest of them."""
    rates = client["history"]["rates"] if client["history"] else []
    per_bar = -(-len(rates) // SPARK_COLUMNS) or 1
    bars = [max(rates[start : start + per_bar]) for start in range(0, len(rates), per_bar)]
    top = max((*bars, client["bound"]))
    return "".join(SPARKS[round(bar / top * (len(SPARKS) - 1))] for bar in bars)


def _of_budget(row: Document) -> str:
    """Write who shares a budget and waits for it, or what a client has of its own."""
    if "active_clients" in row:
        parts = [f"{row['active_clients']:,} active", f"{row['waiting']:,} waiting"]
        parts += [f"{rate_text(row['guaranteed'])} guaranteed"] if row["guaranteed"] else []
        parts += [f"in {row['parent']}"] if row["parent"] else []
        return ", ".join(parts)
    share = row.get("fair_share")
    if share is None:
        return UNKNOWN
    parts = [f"share {rate_text(share)}"]
    parts += [f"borrows {rate_text(row['borrowed'])}"] if _is_loan(row["borrowed"], share) else []
    parts += [f"lends {rate_text(row['lent'])}"] if _is_loan(row["lent"], share) else []
    parts += [row["waits_for"]] if row["waits_for"] else []
    return ", ".join(parts)


def _is_loan(rate: float, share: float) -> bool:
    """Return whether what is borrowed or lent is more than what measured rates waver by."""
    return rate >= LEAST_LOAN * share


CLIENT_COLUMNS = (
    Column("client", "title", ratio=3, is_name=True),
    Column("quota", lambda row: QuotaKind(row["quota"]).label),
    Column("rate", lambda row: rate_text(row["rate"], row["unit"]), "rate"),
    Column("bound", lambda row: rate_text(row["bound"], row["unit"]), "rate", 100),
    Column("of it", lambda row: f"{row['rate'] / row['bound']:.0%}", "share"),
    Column("last 10 min", _sparks, from_width=150),
    Column("held in 1 min", _holds, "seconds"),
    Column("ends in", "hold_ends_in_s", "seconds"),
    Column("rule", _rule, from_width=120, ratio=2, is_name=True),
)

BUDGET_COLUMN = Column("of its budget", _of_budget, from_width=150, ratio=4)


def _queries(status: Document, order: str, width: int, rows: int | None) -> _Drawn:
    shown = _by_name(status["queries"], QUERIES, order)[:rows]
    lines = ((query, ALARM if _alarms(query) else CALM) for query in shown)
    below = f"{len(shown)} of {status['followed']} Spark queries"
    return draw_table(QUERY_COLUMNS, lines, width), Text(below, "dim")


def _by_name(documents: Sequence[Document], view: str, order: str) -> list[Document]:
    if order_in_force(view, order) == "name":
        return sorted(documents, key=lambda document: str(document["name"]))
    return list(documents)


def _alarms(query: Document) -> list[str]:
    """Return what needs somebody: a failure, partitions that are stuck, commits that fail."""
    commit = query["commit"]
    alarms = {
        FAILED: query["state"] == FAILED,
        f"{query['stuck_partitions']} stuck": query["stuck_partitions"],
        "not committed": commit and not commit["ok"],
    }
    return [text for text, is_so in alarms.items() if is_so]


def _query_state(query: Document) -> str:
    state, skipped, advice = query["state"], query["skipped_records"], query["advice"]
    parts = [] if state == FAILED else [state]
    parts += _alarms(query)
    parts += [f"{skipped:,} skipped"] if skipped else []
    parts += [f"{len(advice)} to mend"] if advice else []
    return ", ".join(parts)


def _lag(query: Document) -> str:
    lag_s = query["lag_s"]
    age = UNKNOWN if lag_s is None else FORMS["seconds"](lag_s)
    return UNKNOWN if query["lag_records"] is None else f"{query['lag_records']:,} {age}"


def _commit(query: Document) -> str:
    commit = query["commit"]
    if commit is None or not commit["ok"]:
        return "FAILS" if commit else UNKNOWN
    return "none yet" if commit["ago_s"] is None else "ok"


QUERY_COLUMNS = (
    Column("query", "name", ratio=3, is_name=True),
    Column("state", _query_state, ratio=3),
    Column("lag", _lag, "count"),
    Column("in flight", "in_flight_records", "count", 120),
    Column("batch", "batch.duration_s", "seconds"),
    Column("rows", "batch.rows", "count", 120),
    Column("records/s", "adaptive.rate", "count"),
    Column("why", "adaptive.reason", from_width=150, ratio=5),
    Column("commit", _commit, from_width=70),
)


def _pipelines(status: Document, order: str, width: int, rows: int | None) -> _Drawn:
    pipelines = _by_name(status["pipelines"], PIPELINES, order)
    lines = [line for pipeline in pipelines for line in _pipeline_rows(pipeline)]
    shown = lines[:rows]
    left = len(lines) - len(shown)
    below = f"{len(pipelines)} of {status['pipelines_total']} pipelines, rates in records/s"
    below += f"; {left} lines do not fit" if left else ""
    return draw_table(NODE.columns, shown, width), Text(below, "dim")


def _pipeline_rows(pipeline: Document) -> Iterator[tuple[Document, str]]:
    """Yield a row for the pipeline, and then for each of its nodes, with their styles."""
    state, why = _pipeline_state(pipeline), _pipeline_why(pipeline)
    head = {"title": pipeline["name"], "shown_state": state, "why": why}
    yield head, WARNING if pipeline["pending"]["full"] else HEAD
    for node in (*pipeline["sources"], *pipeline["stages"]):
        held = is_node_held(node)
        row = {"received_rate": node["measured_rate"], **node, "title": f"  {node['name']}"}
        why = (held and (node.get("waits") or node)["reason"]) or UNKNOWN
        yield row | {"shown_state": _node_state(node), "why": why}, WARNING if held else CALM


def _node_state(node: Document) -> str:
    held = [_held(node)] if is_node_held(node) else []
    if "alive" not in node:
        return ", ".join(["source", *held])
    return ", ".join([*(held or ["not held"]), *([] if node["alive"] else ["silent"])])


def _held(node: Document) -> str:
    if node.get("waits"):
        return f"waits for {node['waits']['for']}"
    return f"held by {', '.join(node['held_by'])}" if node["held_by"] else "being released"


def _pipeline_state(pipeline: Document) -> str:
    pending = pipeline["pending"]
    most = "" if pending["max_batches"] is None else f" of {pending['max_batches']:,}"
    states = [f"{pending['batches']:,}{most} pending"]
    states += ["FULL"] if pending["full"] else []
    states += [f"{pipeline['failed']:,} failed"] if pipeline["failed"] else []
    states += [f"{pipeline['timed_out']:,} timed out"] if pipeline["timed_out"] else []
    return ", ".join(states)


def _pipeline_why(pipeline: Document) -> str:
    oldest = pipeline["oldest"]
    why = f"{pipeline['completed']:,} completed"
    if oldest is not None:
        age = f"{oldest['age_s']:,.0f} s"
        why += f"; batch {oldest['batch']} waits at {oldest['waits_at']}, {age} old"
    return why
