"""Reads the teams' file: whose a client or topic is, and what a GiB costs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as Spark's own documentation has it

from .command_line import UsageInputError, cause_of

NO_TEAM, OTHERS = "no team", "others"
"""What stands for the remainder, and in pictures for the smaller teams: no team has such a name."""

ENTRY_KINDS = {
    "users": "user",
    "client-ids": "client id",
    "client-id-prefixes": "client id prefix",
    "topics": "topic",
}
"""The keys of a team, in the order in which they say whose a record is."""
_LINE = re.compile(r"\bline:? ([0-9]+)")
PRICE_KEYS = ("currency", "read_per_gib", "write_per_gib")


class Prices(NamedTuple):
    """What a GiB costs, by direction, in a currency."""

    currency: str
    read_per_gib: float
    write_per_gib: float


class Teams(NamedTuple):
    """A teams' file; `entries` are those of each team by the keys of ENTRY_KINDS."""

    entries: Mapping[str, Mapping[str, Sequence[str]]]
    prices: Prices | None


class _Entry(NamedTuple):
    team: str
    kind: str
    value: str
    place: str


def read_teams(spark: SparkSession, path: Path) -> Teams:
    """Read a YAML file, or JSON. Raises UsageInputError with the place of a mistake."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise UsageInputError(f"{path}: can't be read: {reason}; fix: name a YAML file") from None
    try:
        document = json.loads(_as_json(spark, text))
    except Exception as error:  # of Java, or of a Spark without what reads YAML
        line = _LINE.search(str(error))
        at = f"{path}:{line[1]}" if line else str(path)
        raise UsageInputError(f"{at}: is not YAML: {cause_of(error)}") from None
    return parse_teams(document, str(path))


def _as_json(spark: SparkSession, text: str) -> str:
    """Return YAML as JSON by the library that Spark brings along; a key twice is refused."""
    jackson = spark._jvm.com.fasterxml.jackson  # noqa: SLF001 - it has no public name
    mapper = jackson.dataformat.yaml.YAMLMapper()
    mapper.configure(jackson.core.JsonParser.Feature.STRICT_DUPLICATE_DETECTION, True)
    return str(mapper.readTree(text).toString()) or "null"


def parse_teams(document: Any, place: str) -> Teams:
    """Check what a teams' file says; `place` is its name. Raises UsageInputError."""
    _check_keys(document, place, ("prices", "teams"))
    teams = document.get("teams")
    if not isinstance(teams, list) or not teams:
        raise UsageInputError(f"{place}: teams: is no list of teams; fix: add - {{name: ...}}")
    entries: dict[str, dict[str, list[str]]] = {}
    for number, team in enumerate(teams):
        at = f"{place}: teams[{number}]"
        _check_keys(team, at, ("name", *ENTRY_KINDS))
        name = team.get("name")
        if not isinstance(name, str) or not name.strip() or name in (NO_TEAM, OTHERS):
            fix = "write another one, as text"
            raise UsageInputError(f"{at}: name: {name!r} is no name of a team; fix: {fix}")
        if name in entries:
            raise UsageInputError(f"{at}: {name!r} is there twice; fix: make one team of both")
        entries[name] = {kind: _texts(team.get(kind), f"{at}: {kind}") for kind in ENTRY_KINDS}
    for first, second in _overlaps(entries):
        raise UsageInputError(
            f"{place}: teams {first.team!r} and {second.team!r} overlap: {first.place} has "
            f"{first.value!r}, {second.place} has {second.value!r}; fix: leave it to one of them"
        )
    return Teams(entries, _prices(document.get("prices"), f"{place}: prices"))


def _check_keys(mapping: Any, place: str, known: Sequence[str]) -> None:
    if not isinstance(mapping, dict):
        raise UsageInputError(f"{place}: is no mapping; fix: its keys are {', '.join(known)}")
    for key in mapping:
        if key not in known:
            fix = f"known here: {', '.join(known)}"
            raise UsageInputError(f"{place}: {key!r} is not a known key; fix: {fix}")


def _texts(values: Any, place: str) -> list[str]:
    values = [] if values is None else values
    if not isinstance(values, list):
        raise UsageInputError(f"{place}: is no list; fix: write [{values}]")
    for value in values:
        if not isinstance(value, str) or not value:
            raise UsageInputError(f"{place}: {value!r} is no text; fix: put it in quotes")
    return values


def _prices(prices: Any, place: str) -> Prices | None:
    """Return the prices, or None where one of them is missing: then nothing has a cost."""
    if prices is None:
        return None
    _check_keys(prices, place, PRICE_KEYS)
    for key, value in prices.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if key == "currency":
            if not isinstance(value, str):
                fix = "write it as text, such as EUR"
                raise UsageInputError(f"{place}: currency: {value!r} is no text; fix: {fix}")
        elif value is not None and not (is_number and 0 <= value < float("inf")):
            fix = "write a number, such as 0.02"
            raise UsageInputError(f"{place}: {key}: {value!r} is no price; fix: {fix}")
    rates = [prices.get(key) for key in PRICE_KEYS[1:]]
    return None if None in rates else Prices(prices.get("currency", ""), *map(float, rates))


def _overlaps(
    entries: Mapping[str, Mapping[str, Sequence[str]]],
) -> Iterator[tuple[_Entry, _Entry]]:
    """Yield the entries of different teams that one user, client id or topic would fit."""
    every = [
        _Entry(team, kind, value, f"{team}.{kind}")
        for team, kinds in entries.items()
        for kind, values in kinds.items()
        for value in values
    ]
    owners: dict[tuple[str, str], _Entry] = {}
    for each in every:
        first = owners.setdefault((each.kind, each.value), each)
        if first.team != each.team:
            yield first, each
    prefixes = [each for each in every if each.kind == "client-id-prefixes"]
    for each in every:
        if each.kind in ("client-ids", "client-id-prefixes"):
            for prefix in prefixes:
                if prefix.team != each.team and each.value.startswith(prefix.value):
                    yield prefix, each


def team_expressions(teams: Teams) -> list[Column]:
    """Return which team each kind of entry gives a record to, in the order in which they count."""

    def given(kind: str, column: str) -> Column:
        pairs = [(v, team) for team, kinds in teams.entries.items() for v in kinds[kind]]
        literals = [F.lit(text) for text in chain.from_iterable(pairs)]
        return F.create_map(*literals)[F.col(column)] if pairs else F.lit(None).cast("string")

    by_prefix = F.lit(None).cast("string")
    for team, kinds in teams.entries.items():
        for prefix in kinds["client-id-prefixes"]:
            fits = F.col("client_id").startswith(prefix)
            by_prefix = F.when(fits, F.lit(team)).otherwise(by_prefix)
    by_client = given("client-ids", "client_id")
    return [given("users", "user"), by_client, by_prefix, given("topics", "topic")]
