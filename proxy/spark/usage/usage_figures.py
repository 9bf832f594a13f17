"""Adds up usage records: by team, day, topic, rule and client. What is collected is small.

The records are read three times: for the sums by day, client and topic, for the sketches of rates,
and for the rates of those who are several. All else is worked out from these, which are smaller.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import date, timedelta
from decimal import Decimal
from typing import Any, NamedTuple

from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, Row, Window
from pyspark.sql import functions as F  # noqa: N812 - as Spark's own documentation has it

from .teams import NO_TEAM, OTHERS, Teams, team_expressions

SKETCH_GROWTH = 1.05
"""Bucket b of a sketch has the rates above 1.05^(b-1) and up to 1.05^b bytes per second."""
RATE_SECONDS = 10
PERCENTILES = {"p95": 0.95, "p99": 0.99}
GIB = 2**30
READ_WRITE = ("read", "write")
WEEK_DAYS, DAY_MS = 7, 86_400_000
TEAMS_DRAWN, TOPICS_LISTED = 10, 20
MOST_CLIENTS = 1000
"""For whom rules are suggested: those with most bytes. Likewise of the runs of members."""

NAME_MARK = "\0"
"""Between user and name of a client, so that no client can be taken for another one."""

_MADE_ANEW = "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
_BY_CLIENT = ("user", "client_id", "rule", "topic", "direction")
_Rates = dict[tuple[str, str], dict[str, Any]]
"""By key and direction: percentiles, the peak, and of how many rates."""
_KEPT = StorageLevel.MEMORY_AND_DISK
_WIDE = "decimal(38,0)"
"""Of what is added up: a thousand records of the most that one may have exceed a bigint."""
_ADDED = ("requests", "connections", "held_seconds", "would_be_seconds", "sampled_bytes", "hashed")


class DateRange(NamedTuple):
    """Days in UTC, both included."""

    first: date
    last: date

    @property
    def days(self) -> list[date]:
        """All of them."""
        count = (self.last - self.first).days + 1
        return [self.first + timedelta(number) for number in range(count)]


class UsageClient(NamedTuple):
    """Whom a rule could name: a client id, or what comes before the part that is made anew."""

    user: str
    """"" for none."""
    name: str
    is_prefix: bool

    @classmethod
    def of(cls, key: str) -> UsageClient:
        """Return the client that a value of the column `client` stands for."""
        user, _, rest = key.partition(NAME_MARK)
        return cls(user, rest[1:], rest[:1] == "p")

    @property
    def title(self) -> str:
        """For people."""
        name = f"{self.name}…" if self.is_prefix else self.name or "(no client id)"
        return f"{name} ({self.user})" if self.user else name


class UsageTotals(NamedTuple):
    """What a team, a rule's clients or a client used; of teams the columns of usage.csv."""

    team: str
    """Or the rule, or the client as `UsageClient.of` reads it."""
    read_bytes: int = 0
    written_bytes: int = 0
    cost: float | None = None
    """None without prices."""
    currency: str = ""
    growth_percent: float | None = None
    """Bytes of the last 7 days against the 7 days before; None where these are not all there."""
    clients: int = 0
    requests: int = 0
    connections: int = 0
    held_seconds: float = 0.0
    would_be_held_seconds: float = 0.0
    busy_seconds: int = 0
    """With traffic, of its clients and directions together."""
    read_p95: int = 0
    """In bytes per second, as all rates."""
    read_p99: int = 0
    read_peak: int = 0
    write_p95: int = 0
    write_p99: int = 0
    write_peak: int = 0
    sampled_bytes: int = 0
    """Of the bytes those whose topic is known by sampling."""
    hashed: int = 0
    """Records with hashed names."""
    first_day: date | None = None
    last_day: date | None = None

    @property
    def bytes(self) -> int:
        """In both directions."""
        return self.read_bytes + self.written_bytes


class UsageFigures(NamedTuple):
    """All that a report shows; lists have what is largest first."""

    span: DateRange
    teams: list[UsageTotals]
    """The last one is the remainder, if teams were given."""
    clients: list[UsageTotals]
    rules: list[UsageTotals]
    by_day: dict[date, dict[str, int]]
    """Bytes by team; those beyond TEAMS_DRAWN are OTHERS."""
    topics: dict[str | None, dict[str, Any]]
    """`bytes`, `read_bytes`, `write_bytes`, and `teams` that have moved them."""
    members: list[Row]
    """Runs of members, those with most `lost` records first."""
    doubtful: Mapping[str, int]
    """How many records are `reversed`, and bytes that are `claimed` by two teams."""


class _Frames(NamedTuple):
    sums: DataFrame
    sketches: DataFrame
    together: DataFrame
    has_teams: bool
    span: DateRange


def figures_of(
    records: DataFrame, span: DateRange, teams: Teams | None, rules: Iterable[str] = ()
) -> UsageFigures:
    """Add up the stored records of some days. Without teams each client is its own team.

    `rules` are those in force now, of which some may be unused.
    """
    found = _sums(records), _sketches(records)
    sums, sketches = (_named(each, teams).persist(_KEPT) for each in found)
    together = _together(_named(records, teams), teams is not None).persist(_KEPT)
    frames = _Frames(sums, sketches, together, teams is not None, span)
    try:
        by_team = _usage(frames, "team")
        used = _usage(frames, "rule")
        unused = {*rules}.difference(each.team for each in used)
        (doubtful,) = _collected(
            sums.agg(
                F.sum("reversed").alias("reversed"),
                F.sum(F.expr("if(claims > 1, bytes, 0)")).alias("claimed"),
            )
        )
        return UsageFigures(
            span,
            _teams(by_team, teams),
            by_team[:MOST_CLIENTS] if teams is None else _usage(frames, "client", MOST_CLIENTS),
            [*used, *map(UsageTotals, sorted(unused))],
            _by_day(sums, by_team[:TEAMS_DRAWN], teams),
            _topics(sums, teams),
            _members(sums, span.first),
            doubtful,
        )
    finally:
        sums.unpersist()
        sketches.unpersist()
        together.unpersist()


def _sums(records: DataFrame) -> DataFrame:
    def counted(condition: str) -> Column:
        return F.sum(F.expr(f"cast({condition} as bigint)"))

    counts = ("bytes", "requests", "connections")
    records = records.withColumns({name: F.col(name).cast(_WIDE) for name in counts})
    return records.groupBy("day", "member", "epoch", *_BY_CLIENT).agg(
        *_added(*counts, "held_seconds", "would_be_seconds"),
        F.sum(F.expr("if(sampled, bytes, 0)")).alias("sampled_bytes"),
        F.max("peak").alias("peak"),
        F.min("sequence").alias("least"),
        F.max("sequence").alias("most"),
        F.count("*").alias("records"),
        counted("coalesce(hashed, false)").alias("hashed"),
        counted("start_ms > end_ms").alias("reversed"),
        F.max("end_ms").alias("latest_ms"),
        F.max(F.expr("end_ms - written_ms")).alias("ahead_ms"),
    )


def _sketches(records: DataFrame) -> DataFrame:
    """Return how many rates each bucket has: sketches are merged by adding them up."""
    each = records.select(*_BY_CLIENT, F.explode("rates").alias("bucket", "rates"))
    return each.groupBy(*_BY_CLIENT, F.col("bucket").cast("int").alias("bucket")).agg(
        F.sum(F.col("rates").cast(_WIDE)).alias("rates")
    )


def _together(records: DataFrame, has_teams: bool) -> DataFrame:
    """Return the rates of those who are several, in each interval: the sum of their peaks in it.

    Those are teams, and clients that are made anew, as the executors of a query are.
    """
    anew = F.when(F.col("client_id").rlike(_MADE_ANEW), F.col("client")).alias("client")
    each = records.where("peak > 0").select(anew, "team", "direction", "end_ms", "peak")
    if not has_teams:  # each client is a team
        each = each.where("client is not null")
    return each.groupBy("client", "team", "direction", "end_ms").agg(*_added("peak"))


def _named(frame: DataFrame, teams: Teams | None) -> DataFrame:
    """Add `client`, `team` and `claims`, how many teams a record could be given to."""
    before = F.regexp_extract("client_id", f"^(.*?){_MADE_ANEW}", 1)
    is_prefix = F.col("client_id").rlike(_MADE_ANEW)
    name = F.when(is_prefix, F.concat(F.lit("p"), before)).otherwise(
        F.concat(F.lit("i"), "client_id")
    )
    client = F.concat(F.coalesce("user", F.lit("")), F.lit(NAME_MARK), name)
    frame = frame.withColumn("client", client)
    if teams is None:
        return frame.withColumn("team", client).withColumn("claims", F.lit(1))
    columns = team_expressions(teams)
    claims = F.size(F.array_distinct(F.array_compact(F.array(*columns))))
    team = F.coalesce(*columns, F.lit(NO_TEAM))
    return frame.withColumn("team", team).withColumn("claims", claims)


def _added(*columns: str) -> list[Column]:
    return [F.sum(column).alias(column) for column in columns]


def _collected(frame: DataFrame) -> list[dict[str, Any]]:
    """Return the rows; sums are whole numbers of Python, which hold any."""
    rows = (row.asDict() for row in frame.collect())
    return [
        {key: int(value) if isinstance(value, Decimal) else value for key, value in row.items()}
        for row in rows
    ]


def _both(column: str, function: Any = F.sum) -> list[Column]:
    """Return a column's sum for each direction, 0 where there is nothing."""
    parts = {each: F.when(F.col("direction") == each, F.col(column)) for each in READ_WRITE}
    return [
        F.coalesce(function(part), F.lit(0)).alias(f"{each}_{column}")
        for each, part in parts.items()
    ]


def _usage(frames: _Frames, key: str, most: int | None = None) -> list[UsageTotals]:
    """Return what each value of a column used, with most bytes first, of `most` of them."""
    week = F.floor(F.datediff(F.lit(frames.span.last), "day") / WEEK_DAYS)  # how many ago
    total = frames.sums.where(F.col(key).isNotNull()).groupBy(key)
    rows = total.agg(
        *_added("bytes", *_ADDED),
        *_both("bytes"),
        *_both("peak", F.max),
        *(F.sum(F.when(week == ago, F.col("bytes"))).alias(f"week_{ago}") for ago in (0, 1)),
        F.countDistinct("client").alias("clients"),
        F.min("day").alias("first_day"),
        F.max("day").alias("last_day"),
    ).orderBy(F.desc("bytes"), key)
    sketches = frames.sketches.where(F.col(key).isNotNull())
    if most is not None:
        rows = rows.limit(most)
        sketches = sketches.join(F.broadcast(rows.select(key)), key)
    rates = _percentiles(sketches, key)
    if key != "rule":
        is_client = key == "client" or not frames.has_teams
        for each, seen in _rates_together(frames.together, key, is_client).items():
            rates.setdefault(each, {}).update(seen)
    has_weeks = frames.span.first <= frames.span.last - timedelta(2 * WEEK_DAYS - 1)
    return [_usage_of(row, row[key], rates, has_weeks) for row in _collected(rows)]


def _rates_together(together: DataFrame, key: str, has_percentiles: bool) -> _Rates:
    """Return by key and direction `peak` and, of clients that are made anew, the percentiles."""
    summed = together.where(F.col(key).isNotNull()).groupBy(key, "direction", "end_ms")
    shares = PERCENTILES if has_percentiles else {}
    columns = [F.expr(f"percentile(peak, {share})").alias(name) for name, share in shares.items()]
    found = summed.agg(*_added("peak")).groupBy(key, "direction")
    rows = _collected(found.agg(F.max("peak").alias("peak"), *columns))
    return {(row[key], row["direction"]): row for row in rows}


def _percentiles(sketches: DataFrame, key: str) -> _Rates:
    """Return by key and direction the edges of the buckets that hold the percentiles.

    They are the nearest ranks, and at most 5 % high. Beside them `rates`, how many there are.
    """
    keys = (key, "direction")
    merged = sketches.groupBy(*keys, "bucket").agg(*_added("rates"))
    whole = Window.partitionBy(*keys)
    up_to = whole.orderBy("bucket").rowsBetween(Window.unboundedPreceding, Window.currentRow)
    ranked = merged.select(
        *keys,
        F.pow(F.lit(SKETCH_GROWTH), "bucket").alias("edge"),
        F.sum("rates").over(up_to).alias("rank"),
        F.sum("rates").over(whole).alias("of"),
    )
    found = ranked.groupBy(*keys).agg(
        *(
            F.min(F.when(F.col("rank") >= share * F.col("of"), F.col("edge"))).alias(name)
            for name, share in PERCENTILES.items()
        ),
        F.max("of").alias("rates"),
    )
    return {(row[key], row["direction"]): row for row in _collected(found)}


def _usage_of(row: Mapping[str, Any], name: str, rates: _Rates, has_weeks: bool) -> UsageTotals:
    known = {field: row[field] for field in UsageTotals._fields if field in row}
    figures = {**known, "team": name, "busy_seconds": 0}
    for direction in READ_WRITE:
        found = {"peak": row[f"{direction}_peak"], **rates.get((name, direction), {})}
        peak = found["peak"]
        figures[f"{direction}_peak"] = round(peak)
        figures["busy_seconds"] += found.get("rates", 0) * RATE_SECONDS
        for each in PERCENTILES:  # no edge of a bucket is above the peak
            rate = found.get(each, 0)
            figures[f"{direction}_{each}"] = round(min(rate, peak or rate))
    growth = None
    if has_weeks and row["week_1"]:
        growth = round(100 * ((row["week_0"] or 0) / row["week_1"] - 1), 1)
    figures["written_bytes"] = row["write_bytes"]
    figures["held_seconds"] = round(row["held_seconds"], 3)
    figures["would_be_held_seconds"] = round(row["would_be_seconds"], 3)
    return UsageTotals(**figures, growth_percent=growth)


def _teams(found: list[UsageTotals], teams: Teams | None) -> list[UsageTotals]:
    """Return a row for each team with its cost, also for those without traffic."""
    if teams is None:
        return [each._replace(team=UsageClient.of(each.team).title) for each in found]
    there, prices = {each.team for each in found}, teams.prices
    names = (name for name in (*teams.entries, NO_TEAM) if name not in there)
    rows = sorted([*found, *map(UsageTotals, names)], key=lambda each: each.team == NO_TEAM)
    if prices is None:
        return rows
    costs = [
        (each.read_bytes * prices.read_per_gib + each.written_bytes * prices.write_per_gib) / GIB
        for each in rows
    ]
    return [
        each._replace(cost=round(costs[number], 6), currency=prices.currency)
        for number, each in enumerate(rows)
    ]


def _title(team: str, teams: Teams | None) -> str:
    return team if teams is not None else UsageClient.of(team).title


def _topics(sums: DataFrame, teams: Teams | None) -> dict[str | None, dict[str, Any]]:
    found = sums.groupBy("topic").agg(
        *_both("bytes"),
        *_added("bytes"),
        F.slice(F.sort_array(F.collect_set("team")), 1, TEAMS_DRAWN).alias("teams"),
    )
    rows = _collected(found.orderBy(F.desc("bytes"), "topic").limit(TOPICS_LISTED))
    return {
        row["topic"]: {**row, "teams": [_title(each, teams) for each in row["teams"]]}
        for row in rows
    }


def _by_day(
    sums: DataFrame, drawn: Iterable[UsageTotals], teams: Teams | None
) -> dict[date, dict[str, int]]:
    names = [each.team for each in drawn]
    shown = F.when(F.col("team").isin(names), F.col("team"))
    daily = sums.groupBy("day", shown.alias("shown"))
    found: dict[date, dict[str, int]] = {}
    for row in _collected(daily.agg(*_added("bytes"))):
        team = OTHERS if row["shown"] is None else _title(row["shown"], teams)
        sizes = found.setdefault(row["day"], {})
        sizes[team] = sizes.get(team, 0) + row["bytes"]  # titles of clients may be the same
    return found


def _members(sums: DataFrame, first: date) -> list[Row]:
    """Return the runs of members, with how many numbers are missing between their records.

    A run that began within the days should have its numbers from 0 on.
    """
    first_ms = (first - date(1970, 1, 1)).days * DAY_MS
    runs = sums.groupBy("member", "epoch").agg(
        F.expr(f"max(most) - min(if(epoch >= {first_ms}, 0, least)) + 1 - sum(records)").alias(
            "lost"
        ),
        F.max("latest_ms").alias("latest_ms"),
        F.max("ahead_ms").alias("ahead_ms"),
    )
    most = runs.orderBy(F.desc(F.abs("lost")), F.desc("ahead_ms")).limit(MOST_CLIENTS)
    found: list[Row] = most.collect()
    return found
