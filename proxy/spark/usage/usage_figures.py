"""Adds up usage records: by team, day, topic, rule and client. What is collected is small.

The records are read twice: once for the sums by day, client and topic, once for the sketches of
rates. All else is worked out from these two, which are smaller by far.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import date, timedelta
from typing import Any, NamedTuple

from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, Row, Window
from pyspark.sql import functions as F  # noqa: N812 - as Spark's own documentation has it

from .teams import NO_TEAM, OTHERS, Prices, Teams, team_columns

BUCKET_GROWTH = 1.05
"""Bucket b of a sketch has the rates above 1.05^(b-1) and up to 1.05^b bytes per second."""
RATE_SECONDS = 10
PERCENTILES = {"p95": 0.95, "p99": 0.99}
GIB = 2**30
READ_WRITE = ("read", "write")
WEEK_DAYS, DAY_MS = 7, 86_400_000
MOST_SHOWN, MOST_CLIENTS = 10, 1000
"""Teams in the picture, topics and rules with most of it; clients that rules are suggested for."""
MOST_TOPICS = 20
TOO_SMALL_SHARE = 0.05
"""A quota is too small by which clients are held for more than this part of their busy time."""

NAME_MARK = "\0"
"""Between user and name of a client that stands for a team: it may not be confused with another."""

_MADE_ANEW = "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
_BY_CLIENT = ("user", "client_id", "rule", "topic", "direction")


class Client(NamedTuple):
    """Whom a rule could name: a client id, or what comes before the part that is made anew."""

    user: str
    """"" for none."""
    name: str
    is_prefix: bool
    is_hashed: bool = False

    @classmethod
    def of(cls, key: str, is_hashed: bool = False) -> Client:
        """Return the client that a key of the figures stands for."""
        user, _, rest = key.partition(NAME_MARK)
        return cls(user, rest[1:], rest[:1] == "p", is_hashed)

    @property
    def title(self) -> str:
        """For people."""
        name = f"{self.name}…" if self.is_prefix else self.name or "(no client id)"
        return f"{name} ({self.user})" if self.user else name


class TeamUsage(NamedTuple):
    """What a team used: the columns of usage.csv. Rates in bytes per second."""

    team: str
    read_bytes: int = 0
    written_bytes: int = 0
    cost: float | None = None
    """None without prices."""
    currency: str = ""
    growth_percent: float | None = None
    """Bytes of the last 7 days against the 7 days before; None where these had none."""
    clients: int = 0
    requests: int = 0
    connections: int = 0
    held_seconds: float = 0.0
    would_be_held_seconds: float = 0.0
    read_p95: int = 0
    read_p99: int = 0
    read_peak: int = 0
    write_p95: int = 0
    write_p99: int = 0
    write_peak: int = 0
    sampled_bytes: int = 0
    """Of the bytes those whose topic is known by sampling."""
    first_day: date | None = None
    last_day: date | None = None

    @property
    def bytes(self) -> int:
        """In both directions."""
        return self.read_bytes + self.written_bytes


class RuleUsage(NamedTuple):
    """How a quota was felt."""

    rule: str
    held_seconds: float
    would_be_seconds: float
    busy_seconds: float
    """The time with traffic of its clients."""
    p99: Mapping[str, float]
    """Of their rates, by direction."""

    @property
    def verdict(self) -> str:
        """What is wrong with it, if anything is."""
        if not self.busy_seconds and not self.held_seconds:
            return "unused"
        held = max(self.held_seconds, self.would_be_seconds)
        return "too small" if held > TOO_SMALL_SHARE * self.busy_seconds else ""


class UsageFigures(NamedTuple):
    """All that a report shows."""

    first: date
    last: date
    teams: list[TeamUsage]
    by_day: dict[date, dict[str, int]]
    """Bytes by team; those beyond MOST_SHOWN are OTHERS."""
    topics: dict[str | None, dict[str, Any]]
    """With most bytes first: `bytes`, `read_bytes`, `write_bytes`, `teams`."""
    rules: list[RuleUsage]
    clients: list[tuple[Client, dict[str, dict[str, int]]]]
    """With most bytes first, and by direction their percentiles and `peak`."""
    members: list[Row]
    """Runs of members, those with most `lost` records first."""
    doubtful: Mapping[str, int]
    """`reversed` records and `hashed` ones, and bytes that are `claimed` by two teams."""


class _Frames(NamedTuple):
    sums: DataFrame
    sketches: DataFrame


_Rates = dict[tuple[str, str], Row]


def figures_of(
    records: DataFrame, first: date, last: date, teams: Teams | None, rules: Iterable[str] = ()
) -> UsageFigures:
    """Add up the stored records of some days. Without teams each client is its own team.

    `rules` are those in force now, of which some may be unused.
    """
    frames = _Frames(_named(_sums(records), teams), _named(_sketches(records), teams))
    for frame in frames:
        frame.persist(StorageLevel.MEMORY_AND_DISK)
    try:
        return _collected(frames, first, last, teams, rules)
    finally:
        for frame in frames:
            frame.unpersist()


def _sums(records: DataFrame) -> DataFrame:
    def counted(condition: str) -> Column:
        return F.sum(F.expr(f"cast({condition} as bigint)"))

    added = ("bytes", "requests", "connections", "held_seconds", "would_be_seconds")
    return records.groupBy("day", "member", "epoch", *_BY_CLIENT).agg(
        *(F.sum(name).alias(name) for name in added),
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
        F.sum("rates").alias("rates")
    )


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
    columns = team_columns(teams)
    claims = F.size(F.array_distinct(F.array_compact(F.array(*columns))))
    team = F.coalesce(*columns, F.lit(NO_TEAM))
    return frame.withColumn("team", team).withColumn("claims", claims)


def _percentiles(sketches: DataFrame, key: str) -> _Rates:
    """Return by key and direction the edges of the buckets that hold the percentiles.

    They are the nearest ranks, and at most 5 % high. Beside them `rates`, how many there are.
    """
    keys = (key, "direction")
    merged = sketches.groupBy(*keys, "bucket").agg(F.sum("rates").alias("rates"))
    whole = Window.partitionBy(*keys)
    up_to = whole.orderBy("bucket").rowsBetween(Window.unboundedPreceding, Window.currentRow)
    ranked = merged.select(
        *keys,
        F.pow(F.lit(BUCKET_GROWTH), "bucket").alias("edge"),
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
    return {(row[key], row["direction"]): row for row in found.collect()}


def _of(direction: str, column: str) -> Column:
    return F.when(F.col("direction") == direction, F.col(column))


def _both(column: str, function: Any = F.sum) -> list[Column]:
    """Return a column's sum for each direction, 0 where there is nothing."""
    return [
        F.coalesce(function(_of(each, column)), F.lit(0)).alias(f"{each}_{column}")
        for each in READ_WRITE
    ]


def _added(*columns: str) -> list[Column]:
    return [F.sum(column).alias(column) for column in columns]


def _collected(
    frames: _Frames, first: date, last: date, teams: Teams | None, rules: Iterable[str]
) -> UsageFigures:
    sums = frames.sums
    usage = _team_usage(frames, first, last, teams)
    doubtful = sums.agg(
        *(F.coalesce(F.sum(name), F.lit(0)).alias(name) for name in ("reversed", "hashed")),
        F.coalesce(F.sum(F.expr("if(claims > 1, bytes, 0)")), F.lit(0)).alias("claimed"),
    )
    (counts,) = doubtful.collect()
    return UsageFigures(
        first,
        last,
        usage,
        _by_day(sums, teams),
        _topics(sums, teams),
        _rules(frames, rules),
        _clients(frames),
        _members(sums, first),
        counts.asDict(),
    )


def team_title(team: str, teams: Teams | None) -> str:
    """Return what a value of the column `team` is for people."""
    return team if teams is not None else Client.of(team).title


def _topics(sums: DataFrame, teams: Teams | None) -> dict[str | None, dict[str, Any]]:
    found = sums.groupBy("topic").agg(
        *_both("bytes"),
        *_added("bytes"),
        F.slice(F.sort_array(F.collect_set("team")), 1, MOST_SHOWN).alias("teams"),
    )
    rows = found.orderBy(F.desc("bytes"), "topic").limit(MOST_TOPICS).collect()
    return {
        row["topic"]: {**row.asDict(), "teams": [team_title(each, teams) for each in row["teams"]]}
        for row in rows
    }


def _by_day(sums: DataFrame, teams: Teams | None) -> dict[date, dict[str, int]]:
    total = sums.groupBy("team").agg(*_added("bytes")).orderBy(F.desc("bytes"), "team")
    shown = total.limit(MOST_SHOWN).select("team", F.col("team").alias("shown"))
    daily = sums.join(F.broadcast(shown), "team", "left").groupBy("day", "shown")
    found: dict[date, dict[str, int]] = {}
    for row in daily.agg(*_added("bytes")).collect():
        team = OTHERS if row["shown"] is None else team_title(row["shown"], teams)
        sizes = found.setdefault(row["day"], {})
        sizes[team] = sizes.get(team, 0) + row["bytes"]  # titles of clients may be the same
    return found


def _team_usage(frames: _Frames, first: date, last: date, teams: Teams | None) -> list[TeamUsage]:
    """Return a row for each team with most bytes first; the remainder is the last one."""
    this_week, week_before = last - timedelta(WEEK_DAYS), last - timedelta(2 * WEEK_DAYS)
    days = F.col("day")
    rows = frames.sums.groupBy("team").agg(
        *_both("bytes"),
        *_both("peak", F.max),
        *_added("requests", "connections", "held_seconds", "would_be_seconds", "sampled_bytes"),
        F.countDistinct("client").alias("clients"),
        F.min("day").alias("first_day"),
        F.max("day").alias("last_day"),
        F.sum(F.when(days > this_week, F.col("bytes"))).alias("this_week"),
        F.sum(F.when((days > week_before) & (days <= this_week), F.col("bytes"))).alias(
            "week_before"
        ),
    )
    rates = _percentiles(frames.sketches, "team")
    prices = teams.prices if teams is not None else None
    has_weeks = first <= week_before + timedelta(1)
    found = [
        _team_row(row, rates, prices, team_title(row["team"], teams), has_weeks)
        for row in rows.collect()
    ]
    there = {each.team for each in found}
    cost, currency = (None, "") if prices is None else (0.0, prices.currency)
    for name in (*teams.entries, NO_TEAM) if teams is not None else ():
        if name not in there:
            found.append(TeamUsage(name, cost=cost, currency=currency))
    return sorted(found, key=lambda each: (each.team == NO_TEAM, -each.bytes, each.team))


def _team_row(
    row: Row, rates: _Rates, prices: Prices | None, title: str, has_weeks: bool
) -> TeamUsage:
    shares = {
        f"{direction}_{name}": figure
        for direction in READ_WRITE
        for name, figure in _rates_of(
            rates, row["team"], direction, row[f"{direction}_peak"]
        ).items()
    }
    growth = None
    if has_weeks and row["week_before"]:
        growth = round(100 * ((row["this_week"] or 0) / row["week_before"] - 1), 1)
    cost = None
    if prices is not None:
        read = row["read_bytes"] * prices.read_per_gib
        cost = round((read + row["write_bytes"] * prices.write_per_gib) / GIB, 6)
    return TeamUsage(
        team=title,
        read_bytes=row["read_bytes"],
        written_bytes=row["write_bytes"],
        cost=cost,
        currency="" if prices is None else prices.currency,
        growth_percent=growth,
        clients=row["clients"],
        requests=row["requests"],
        connections=row["connections"],
        held_seconds=round(row["held_seconds"], 3),
        would_be_held_seconds=round(row["would_be_seconds"], 3),
        sampled_bytes=row["sampled_bytes"],
        first_day=row["first_day"],
        last_day=row["last_day"],
        **shares,
    )


def _rates_of(rates: _Rates, key: str, direction: str, peak: float) -> dict[str, int]:
    """Return percentiles and peak; no edge of a bucket is above the peak."""
    found = rates.get((key, direction))
    edges = {name: 0.0 if found is None else found[name] for name in PERCENTILES}
    least = {name: round(min(edge, peak or edge)) for name, edge in edges.items()}
    return {**least, "peak": round(peak)}


def _rules(frames: _Frames, known: Iterable[str]) -> list[RuleUsage]:
    """Return the quotas by which clients were held, those with the longest holds first."""
    of_rules = frames.sums.where("rule is not null").groupBy("rule")
    rows = of_rules.agg(
        *_both("bytes"), *_both("peak", F.max), *_added("held_seconds", "would_be_seconds")
    ).collect()
    rates = _percentiles(frames.sketches.where("rule is not null"), "rule")

    def usage(row: Row) -> RuleUsage:
        busy = sum(found["rates"] for key, found in rates.items() if key[0] == row["rule"])
        p99 = {
            each: _rates_of(rates, row["rule"], each, row[f"{each}_peak"])["p99"]
            for each in READ_WRITE
        }
        held, would_be = row["held_seconds"], row["would_be_seconds"]
        return RuleUsage(row["rule"], held, would_be, busy * RATE_SECONDS, p99)

    found = [usage(row) for row in rows]
    seen = {each.rule for each in found}
    found += [RuleUsage(rule, 0.0, 0.0, 0.0, {}) for rule in known if rule not in seen]
    return sorted(found, key=lambda each: (-each.held_seconds, -each.busy_seconds, each.rule))


def _clients(frames: _Frames) -> list[tuple[Client, dict[str, dict[str, int]]]]:
    total = frames.sums.groupBy("client").agg(*_added("bytes", "hashed"), *_both("peak", F.max))
    most = total.orderBy(F.desc("bytes"), "client").limit(MOST_CLIENTS).persist()
    of_most = frames.sketches.join(F.broadcast(most.select("client")), "client")
    rates, rows = _percentiles(of_most, "client"), most.collect()
    most.unpersist()
    return [
        (
            Client.of(row["client"], row["hashed"] > 0),
            {
                each: _rates_of(rates, row["client"], each, row[f"{each}_peak"])
                for each in READ_WRITE
                if (row["client"], each) in rates
            },
        )
        for row in sorted(rows, key=lambda row: (-row["bytes"], row["client"]))
    ]


def _members(sums: DataFrame, first: date) -> list[Row]:
    """Return the runs of members, with how many numbers are missing between their records.

    A run that began within the days should have its numbers from 0 on.
    """
    first_ms = (first - date(1970, 1, 1)).days * DAY_MS
    runs = sums.groupBy("member", "epoch").agg(
        F.min(F.when(F.col("epoch") >= first_ms, F.lit(0)).otherwise(F.col("least"))).alias("from"),
        F.max("most").alias("to"),
        F.sum("records").alias("records"),
        F.max("latest_ms").alias("latest_ms"),
        F.max("ahead_ms").alias("ahead_ms"),
    )
    runs = runs.withColumn("lost", F.expr("to - from + 1 - records"))
    most = runs.orderBy(F.desc(F.abs("lost")), F.desc("ahead_ms")).limit(MOST_CLIENTS)
    found: list[Row] = most.collect()
    return found
