"""Suggests rules from what was observed, as YAML with the figures behind each, and as JSON."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context, Decimal
from operator import attrgetter

from aiohttp import web

from metrics.clock import MS_PER_SECOND
from proxy.admin.admin_parts import AdminParts
from proxy.admin.document_models import DocumentModel, RowContext, iso, printable, size_text
from proxy.admin.pagination import PageBuilder, PageRequest, page_request_of
from proxy.admin.replies import ApiError, json_reply, parse_field
from proxy.cluster.upstream import NonRetriableError, UpstreamError
from proxy.quota.entities import DEFAULT, QuotaKind
from proxy.quota.rules import RuleMatch, RuleTable
from proxy.quota.values import parse_duration
from proxy.slices import TimeSlicer
from proxy.state import Document, StateError
from proxy.usage.observed_usage import READ_LIMIT_S, ObservedClient, ObservedUsage, RateDistribution
from proxy.usage.usage_meter import RATE_INTERVAL_MS

SUGGESTED_HEADROOM = 1.5  # of the p99: what a bound is before it is rounded up

STEP, SUGGESTED_UNITS = 1024, ("KiB", "MiB", "GiB")
LEAST_KIB = 100  # no bound is lower: it should let a few record batches through in a second
UP_TO_TWO_DIGITS = Context(prec=2, rounding=ROUND_CEILING)

SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}

SUGGESTIONS_PATH = "/v1/suggestions"
DEFAULT_SINCE = "24h"
MAX_SINCE_H = 7 * 24
SECONDS_PER_HOUR = 3600

READ_FIX = "let quota-proxy describe and read the topic, see docs/usage.md; or ask for less"
NO_USAGE_FIX = (
    "add usage: {topic: quota-proxy-usage} to the configuration, restart, and ask again after a day"
)


@dataclass(frozen=True, slots=True)
class Suggestion:
    """What was seen of a client, and what follows from it."""

    client: ObservedClient
    seen: Mapping[QuotaKind, RateDistribution]
    """At least one."""
    matches: Mapping[QuotaKind, RuleMatch | None]
    """The rules that bound it now, or would; of hashed names that is not known."""

    @property
    def example(self) -> str:
        """A client id of it."""
        return next(iter(self.seen.values())).example.client_id or ""

    @property
    def has_rule(self) -> bool:
        """Whether a rule for it and nobody else bounds all of what was seen."""
        return all(
            match is not None and match.rule.keys == self.keys for match in self.matches.values()
        )

    @property
    def can_be_named(self) -> bool:
        """Whether a rule can be for it and nobody else."""
        return self.client.name not in ("", DEFAULT) and not self.client.is_hashed

    @property
    def keys(self) -> dict[str, str]:
        """Return the keys of a rule for it."""
        name, user = self.client.name, self.client.user
        if self.client.is_hashed:
            return {}
        keys = {} if user is None else {"user": user}
        return {**keys, ("client-id-prefix" if self.client.is_prefix else "client-id"): name}

    @property
    def budget(self) -> str | None:
        """The budget that it is in now: a rule of its own stays in it."""
        rules = (match.rule for match in self.matches.values() if match is not None)
        return next((rule.share.budget.name for rule in rules if rule.share), None)

    @property
    def key(self) -> tuple[str | int, ...]:
        """What a walk has it by."""
        client = self.client
        return client.name, client.user or "", 2 * client.is_prefix + (client.user is None)

    @property
    def urgency(self) -> tuple[bool, int]:
        """What is not bounded in all that was seen comes first, then what has most bytes."""
        seen_bytes = sum(seen.total_bytes for seen in self.seen.values())
        return None in self.matches.values(), seen_bytes

    def bound(self, kind: QuotaKind) -> str:
        """Return a bound for a direction in which it was seen."""
        return round_up(self.seen[kind].quantile(SHARES["p99"]) * SUGGESTED_HEADROOM)

    def quota(self, kind: QuotaKind) -> Document:
        """Return for JSON what was seen in a direction."""
        seen, match = self.seen[kind], self.matches.get(kind)
        return {
            "quota": str(kind),
            "bound": self.bound(kind),
            **{name: round(seen.quantile(share)) for name, share in SHARES.items()},
            **{"peak": round(seen.peak), "total_bytes": seen.total_bytes},
            "intervals": seen.counts.total(),
            "rule": match and match.rule.title,
        }


async def suggest(
    observed: ObservedUsage, table: RuleTable, slices: TimeSlicer, page: PageRequest
) -> PageBuilder[Suggestion]:
    """Return suggestions for a page of the clients that were seen: unbounded ones come first.

    Of both kinds those with most bytes come first. `table` has the rules in force.
    """
    found = PageBuilder[Suggestion](page, attrgetter("key"), attrgetter("urgency"))

    def making() -> Iterator[bool]:
        for client, by_kind in observed.by_client.items():
            example = next(iter(by_kind.values())).example
            known = () if client.is_hashed else by_kind
            matches = {kind: table.match(kind, example) for kind in known}
            yield found.add(Suggestion(client, by_kind, matches))

    await slices.collect(making())
    return found


def round_up(rate: float) -> str:
    """Return the next size of two digits that is no lower than a rate in bytes per second."""
    size = Decimal(max(rate, LEAST_KIB * STEP)) / STEP
    for unit in SUGGESTED_UNITS:
        rounded = UP_TO_TWO_DIGITS.plus(size)
        if rounded < STEP or unit == SUGGESTED_UNITS[-1]:
            break
        size = max(size / STEP, Decimal(1))  # at least one digit stands before the point
    return f"{rounded.normalize():f}{unit}"


SUGGESTION = DocumentModel[Suggestion](
    """
    keys, example: of a rule for it, none where names are hashed; and one of its client ids
    quotas: for each `quota` the suggested `bound`; `p50`, `p95`, `p99` and `peak` in bytes per
        second; `total_bytes`; how many `intervals` of 10 s had traffic; and the title of the `rule`
        in force, `null` where nothing bounds it
    """,
    {"quotas": lambda each, _: list(map(each.quota, each.seen))},
)


def as_yaml(
    shown: Sequence[Suggestion], left_off: int, since: str, now_s: float, observed: ObservedUsage
) -> Iterator[str]:
    """Yield the lines of a `quotas` section, with the figures behind each rule as comments.

    `left_off`: how many clients with fewer bytes are not `shown`.
    """
    interval_s = RATE_INTERVAL_MS / MS_PER_SECOND
    yield f"# Suggested at {iso(now_s)} from what passed in the last {since}."
    headroom = f"times {SUGGESTED_HEADROOM:g}, up to two digits"
    yield f"# A bound is the p99 of the client's rates, {headroom}."
    yield f"# A rate is that of {interval_s:g} s with traffic; times without any do not count."
    yield "# p50, p95 and p99 are at most 5 % high."
    yield "# What goes over a bound waits: see whether a peak is worth a higher one."
    yield "# What has a rule of its own is in comments."
    yield "# To try the rules without holding anybody, write throttle: {enforce: false}."
    if observed.left_out:
        lack = "left out, or a part of them, for lack of room (limits.max_client_entities)"
        yield f"# {len(observed.left_out)} clients or more are {lack}."
    if observed.is_cut:
        yield f"# Not all records could be read in {READ_LIMIT_S:g} s: ask for less with --since."
    if observed.unread:
        yield f"# {observed.unread} messages of the topic are no records that this version reads."
    if left_off:
        yield f"# Left off: {left_off} clients with fewer bytes."
    named = [each for each in shown if each.can_be_named]
    yield "quotas:"
    yield "  rules: []" if all(each.has_rule for each in named) else "  rules:"
    for each in named:
        yield from _rule_lines(each)
    for each in shown:
        if not each.can_be_named:
            yield ""
            example = _quoted(each.example)
            if each.client.is_hashed:
                yield f"    # No rule can name it: names are hashed; {example}"
            else:
                yield f"    # No rule can name these clients alone, such as {example}:"
            yield from _figures(each)


def _rule_lines(suggestion: Suggestion) -> Iterator[str]:
    client = suggestion.client
    yield ""
    if client.is_prefix:
        example = _quoted(suggestion.example)
        yield f"    # One bound for all client ids that are made anew, such as {example}"
    yield from _figures(suggestion)
    lines = [f"{key}: {_quoted(value)}" for key, value in suggestion.keys.items()]
    lines += ["scope: shared"] if client.is_prefix else []
    lines += [f"budget: {_quoted(suggestion.budget)}"] if suggestion.budget else []
    lines += [f"{kind}: {suggestion.bound(kind)}" for kind in suggestion.seen]
    mark = "# " if suggestion.has_rule else ""
    for number, line in enumerate(lines):
        yield f"    {mark}{' ' if number else '-'} {line}"


def _figures(suggestion: Suggestion) -> Iterator[str]:
    for kind, seen in suggestion.seen.items():
        quantiles = (f"{name} {_rate(seen.quantile(share))}" for name, share in SHARES.items())
        yield f"    # {kind}: {', '.join(quantiles)}, peak {_rate(seen.peak)}"
        hours = seen.counts.total() * RATE_INTERVAL_MS / MS_PER_SECOND / SECONDS_PER_HOUR
        busy = f"{size_text(seen.total_bytes, 3, 'TiB')} in {hours:.3g} h with traffic"
        about = f"; {_bounded(kind, suggestion.matches[kind])}" if suggestion.matches else ""
        yield f"    #   {busy}{about}"


def _bounded(kind: QuotaKind, match: RuleMatch | None) -> str:
    """Return what bounds a client now: where it is held, it might take more than was seen."""
    if match is None:
        return "NO RULE BOUNDS IT"
    rule = match.rule
    held = "held to" if match.enforced else "not enforced:"
    where = f", {rule.place}" if rule.place else ""
    return f"{held} {kind.unit.format(rule.ceilings[kind])} by {_quoted(rule.shared_entity)}{where}"


def _quoted(text: str) -> str:
    """Write text for YAML, and for a comment: nothing in it ends the line or is not seen."""
    quoted = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{printable(quoted)}"'


def _rate(rate: float) -> str:
    return f"{size_text(rate, 3, 'TiB')}/s"


async def suggestions_reply(parts: AdminParts, request: web.Request) -> web.Response:
    """Answer by the rules in force, of what usage records say."""
    (since, since_s), page, now_s = parse_since(request), page_request_of(request), time.time()
    if parts.observe is None:
        what = "no usage is recorded, so there is nothing to suggest from"
        raise ApiError(404, what, NO_USAGE_FIX)
    try:
        observed = await parts.observe(since_s)
    except (UpstreamError, NonRetriableError, StateError) as error:
        raise ApiError(503, f"usage records cannot be read: {error}", READ_FIX) from None
    slices = parts.slices
    found = await suggest(observed, parts.quotas.table, slices, page)
    shown, now = found.rows(), RowContext(now_s)
    left_off = found.total - len(shown) if page.after is None else 0
    lines = await slices.collect(as_yaml(shown, left_off, since, now_s, observed))
    clients = await slices.collect(SUGGESTION.document(each, now) for each in shown)
    text = "\n".join(lines) + "\n"
    about = {"since_s": since_s, "yaml": text, "total": found.total}
    return json_reply({**about, "clients": clients, **found.next()})


def parse_since(request: web.Request) -> tuple[str, float]:
    """Read `?since=TIME`; return it as it was written, and in seconds."""
    since = request.query.get("since", DEFAULT_SINCE)
    since_s = parse_field("since", parse_duration, since)
    if since_s > MAX_SINCE_H * SECONDS_PER_HOUR:
        fix = f"write at most {MAX_SINCE_H}h; quota-proxy usage report takes more days"
        raise ApiError(400, f"since: it is more than {MAX_SINCE_H} h", fix)
    return since, since_s
