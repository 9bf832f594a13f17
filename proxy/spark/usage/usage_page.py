"""Writes the report as one HTML page that needs nothing else: inline style, SVG, no scripts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from .teams import NO_TEAM, OTHERS
from .usage_figures import UsageFigures, UsageTotals

COLOURS = tuple(
    "#d9730d #4a7fb5 #5b8c5a #9065b0 #c29343 #3e8e8e #b35c7a #6b6f9c #8f6b4a #7a9a3a".split()  # noqa: SIM905
)
GREY = "#b9b8b3"
WIDTH_PX, HEIGHT_PX, MARGIN_PX, FOOT_PX = 960, 240, 76, 22
"""Of the picture of days."""
BAR_PX, ROW_PX, NAME_PX, WORDS_PX = 16, 24, 250, 150
"""Of a bar its height, that with the gap, and the room for its name and figure."""
DATES_SHOWN, BARS_SHOWN, ROWS_SHOWN, NAME_CHARS = 10, 15, 200, 34
LONGEST_NAME = 256  # that is shown whole

STYLE = """
body{font:15px/1.45 system-ui,sans-serif;color:#37352f;max-width:1000px;margin:32px auto}
h1{font-size:26px;margin:0}h2{font-size:18px;margin:34px 0 8px}p,footer{color:#787774}
.tile{display:inline-block;border:1px solid #e6e6e3;border-radius:8px;padding:8px 16px;margin:4px}
.tile b{display:block;font-size:22px}ul{background:#faf3dd;border-radius:8px;padding:12px 32px}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:5px 6px;border-bottom:1px solid #e6e6e3;font-size:13px}
td{white-space:nowrap}th{color:#787774}.text{text-align:left;white-space:normal}svg{max-width:100%;height:auto}
svg text{font:12px system-ui,sans-serif;fill:#37352f}.key{margin-right:14px}
"""
NO_FIGURE = "-"
TOO_SMALL_SHARE = 0.05
"""A quota is too small by which clients are held for more than this part of their busy time."""
TEAM_HEADS = (
    "Team|Read|Written|Cost|Growth in 7 days|p95 read|p99 read|Peak read|p99 write|Peak write|Held"
)
TOPIC_HEADS = "Topic|By|Read|Written"
RULE_HEADS = "Rule||Held|Would be held|Time with traffic|p99 read|p99 write"


def size_words(size: float) -> str:
    """Write bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1000:  # noqa: PLR2004 - of three digits
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


def cost_words(cost: float, currency: str) -> str:
    """Write a cost for people: small ones with more digits."""
    return f"{cost:,.{2 if cost >= 1 or not cost else 4}f} {currency}"


def _rate(rate: float) -> str:
    return f"{size_words(rate)}/s" if rate else NO_FIGURE


def time_words(seconds: float) -> str:
    """Write a duration for people."""
    for limit, step, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / step:.3g} {unit}"
    return f"{seconds / 86_400:.4g} days"


def cut_name(name: str, most_chars: int = LONGEST_NAME) -> str:
    """Return a name without its end where it is longer; by default, than any should be."""
    return name if len(name) <= most_chars else f"{name[: most_chars - 1]}…"


def _money(team: UsageTotals) -> str:
    return NO_FIGURE if team.cost is None else cost_words(team.cost, team.currency)


def html_of(figures: UsageFigures, notes: Sequence[str], made_at: str) -> str:
    """Return the page; `notes` are what a reader must know of the figures."""
    return "".join(f"{part}\n" for part in _parts(figures, notes, made_at))


def _parts(figures: UsageFigures, notes: Sequence[str], made_at: str) -> Iterator[str]:
    teams, span = figures.teams, f"{figures.span.first} to {figures.span.last}"
    yield '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
    yield f"<title>Kafka usage, {span}</title><style>{STYLE}</style></head><body>"
    yield f"<h1>Who used what of Kafka</h1><p>{span}, days in UTC. Made {escape(made_at)}.</p>"
    yield from _tiles(teams)
    yield "<h2>What to know about these figures</h2>"
    yield f"<ul>{''.join(f'<li>{escape(note)}</li>' for note in notes)}</ul>"
    yield "<h2>Bytes per day</h2>"
    yield from _days(figures)
    costs = any(team.cost is not None for team in teams)
    yield f"<h2>{'Cost' if costs else 'Bytes'} by team</h2>"
    yield _bars(
        (team.team, team.cost or 0.0, _money(team))
        if costs
        else (team.team, team.bytes, size_words(team.bytes))
        for team in teams[:BARS_SHOWN]
    )
    yield "<h2>Teams</h2>"
    yield _table(TEAM_HEADS, map(_team_cells, teams[:ROWS_SHOWN]), 1)
    if len(teams) > ROWS_SHOWN:
        yield f"<p>{len(teams) - ROWS_SHOWN} more are in usage.csv.</p>"
    yield "<h2>Largest topics</h2>"
    titled = [(topic or "(of no topic)", row) for topic, row in figures.topics.items()]
    yield _bars((name, row["bytes"], size_words(row["bytes"])) for name, row in titled)
    cells = (
        (
            name,
            ", ".join(map(cut_name, row["teams"])),
            size_words(row["read_bytes"]),
            size_words(row["write_bytes"]),
        )
        for name, row in titled
    )
    yield _table(TOPIC_HEADS, cells, 2)
    yield "<h2>Quotas</h2>"
    yield _table(RULE_HEADS, map(_rule_cells, figures.rules[:ROWS_SHOWN]), 2)
    yield "<footer>Bytes are those on the wire: compressed, with headers. A rate is that of 10 s"
    yield "with traffic. Percentiles are at most 5 % high; those of a team are of each client by"
    yield "itself, its peak is of all together.</footer></body></html>"


def _tiles(teams: Sequence[UsageTotals]) -> Iterator[str]:
    costs = [team.cost for team in teams if team.cost is not None]
    figures = {
        "read": size_words(sum(team.read_bytes for team in teams)),
        "written": size_words(sum(team.written_bytes for team in teams)),
        "cost": cost_words(sum(costs), teams[0].currency) if costs else NO_FIGURE,
        "teams with traffic": str(sum(team.bytes > 0 for team in teams)),
    }
    for name, text in figures.items():
        yield f'<div class="tile"><b>{escape(text)}</b>{name}</div>'


def _days(figures: UsageFigures) -> Iterator[str]:
    """Draw a bar for each day, with the teams one upon the other, and the key to their colours."""
    by_day, days = figures.by_day, figures.span.days
    total: dict[str, int] = {}
    for row in by_day.values():
        for team, size in row.items():
            total[team] = total.get(team, 0) + size
    names = sorted(total, key=lambda name: (name in (NO_TEAM, OTHERS), -total[name], name))
    colours = dict.fromkeys(names, GREY)
    for number, name in enumerate([name for name in names if name != OTHERS][: len(COLOURS)]):
        colours[name] = COLOURS[number]
    most = max((sum(row.values()) for row in by_day.values()), default=0) or 1
    step, floor = (WIDTH_PX - MARGIN_PX) / len(days), HEIGHT_PX - FOOT_PX
    yield f'<svg viewBox="0 0 {WIDTH_PX} {HEIGHT_PX}" role="img">'
    for share in (0.5, 1.0):
        y = floor - share * (floor - FOOT_PX)
        yield f'<path d="M{MARGIN_PX} {y:.1f}H{WIDTH_PX}" stroke="#e6e6e3"/>'
        yield f'<text x="0" y="{y + 4:.1f}">{size_words(share * most)}</text>'
    for number, day in enumerate(days):
        x, y = MARGIN_PX + number * step, float(floor)
        for name in names:
            size = by_day.get(day, {}).get(name, 0)
            height = size / most * (floor - FOOT_PX)
            y -= height
            title = escape(f"{day} {cut_name(name)}: {size_words(size)}")
            yield (
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{step * 0.8:.1f}" height="{height:.1f}" '
                f'fill="{colours[name]}"><title>{title}</title></rect>'
            )
        if number % -(-len(days) // DATES_SHOWN) == 0:
            yield f'<text x="{x:.1f}" y="{HEIGHT_PX - 4}">{day:%b %d}</text>'
    yield "</svg><p>"
    for name in names:
        key = escape(cut_name(name))
        yield f'<span class="key"><b style="color:{colours[name]}">■</b> {key}</span>'
    yield "</p>"


def _bars(rows: Iterable[tuple[str, float, str]]) -> str:
    """Draw a bar across for each name, figure, and text of the figure."""
    rows = list(rows)
    most = max((figure for _, figure, _ in rows), default=0) or 1
    parts = [f'<svg viewBox="0 0 {WIDTH_PX} {ROW_PX * len(rows)}" role="img">']
    for number, (name, figure, words) in enumerate(rows):
        width, y = figure / most * (WIDTH_PX - NAME_PX - WORDS_PX), ROW_PX * number
        shown, title = escape(cut_name(name, NAME_CHARS)), escape(cut_name(name))
        parts += (
            f'<text x="0" y="{y + 13}">{shown}<title>{title}</title></text>',
            f'<rect x="{NAME_PX}" y="{y}" width="{width:.1f}" height="{BAR_PX}" fill="#4a7fb5"/>',
            f'<text x="{NAME_PX + width + 8:.1f}" y="{y + 13}">{escape(words)}</text>',
        )
    return "".join((*parts, "</svg>"))


def _table(heads: str, rows: Iterable[Sequence[str]], texts: int) -> str:
    """Write a table, whose first so many columns are text."""

    def cells(tag: str, row: Sequence[str]) -> str:
        mark = ' class="text"'
        return "".join(
            f"<{tag}{mark if number < texts else ''}>{escape(cell)}</{tag}>"
            for number, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table><tr>{cells('th', heads.split('|'))}</tr>{body}</table>"


def _team_cells(team: UsageTotals) -> Sequence[str]:
    growth = NO_FIGURE if team.growth_percent is None else f"{team.growth_percent:+.0f} %"
    sizes = (size_words(team.read_bytes), size_words(team.written_bytes))
    rates = (team.read_p95, team.read_p99, team.read_peak, team.write_p99, team.write_peak)
    held = time_words(team.held_seconds)
    return (cut_name(team.team), *sizes, _money(team), growth, *map(_rate, rates), held)


def _rule_cells(rule: UsageTotals) -> Sequence[str]:
    held = max(rule.held_seconds, rule.would_be_held_seconds)
    verdict = "too small" if held > TOO_SMALL_SHARE * rule.busy_seconds else ""
    verdict = "unused" if rule.first_day is None else verdict
    times = (rule.held_seconds, rule.would_be_held_seconds, rule.busy_seconds)
    rates = (rule.read_p99, rule.write_p99)
    return (cut_name(rule.team), verdict, *map(time_words, times), *map(_rate, rates))
