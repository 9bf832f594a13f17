"""Decide which rule bounds a client, and whose traffic is added up for it.

The order is Kafka's, for each kind of quota by itself: the first match wins of (user, client-id),
(user, default client-id), (user), (default user, client-id), (default user, default client-id),
(default user), (client-id), (default client-id). The project's own keys, client-id prefix and
listener, stand between these levels; see `Rule.rank`.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from heapq import nsmallest
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Self

from pydantic import StrictBool

from metrics.exposition import OTHER

from .entities import DEFAULT, ClientIdentity, QuotaKind
from .fields import Prefix, SettingsBase, Text, Topic, TopicPrefix
from .schedules import Schedule
from .validation import (
    CLIENT_KEYS,
    KEYS,
    PREFIX_KEYS,
    check_rule_keys,
    find_bound_conflicts,
    find_key_problems,
    format_selector,
    parse_quota_bounds,
    parse_scope,
)
from .values import BadValueError

# What tells the parts of an entity apart must not occur in a value, or two entities could collide.
ESCAPES = str.maketrans({char: f"%{ord(char):02X}" for char in "%,=<>"})

CLIENT_ID_KEYS = frozenset({"client-id", "client-id-prefix"})

DEFAULT_BURST_MS = 500.0
"""Of its bound, what a client may save up while it is held, where `quotas.burst` is not set."""

MAX_MISMATCHES = 10
"""Of the rules that are not for a client, at most so many are told of for each kind of quota."""

MOST_LEVELS = 3
"""Of budgets within budgets."""

ALL_CLIENTS = "all"
"""The name of the pause that is for every client."""

PAUSED = ",paused"
"""Ends the entity of clients that are paused while others of their entity are held: their traffic
must not count for those."""

Rank = tuple[int, int, int, int]

TopicRank = tuple[int, int]

Named = tuple[str | None, str | None, str | None]
"""What rules of one rank tell clients apart by: user, client id or prefix, and listener."""

ALL_TOPICS, EXACT, PREFIX, LISTENER_ONLY, ANY, UNNAMED = range(-1, 5)


def rule_mismatch(keys: Mapping[str, str], identity: ClientIdentity) -> str | None:
    """Return which of a rule's keys a client has not, for people; None when it has all."""
    client_id, prefix = identity.client_id or "", keys.get("client-id-prefix", "")
    listener, user = keys.get("listener"), keys.get("user")
    if listener not in (None, identity.listener):
        return f"the listener is {identity.listener!r}, not {listener!r}"
    if user is not None and identity.user is None:
        return "the client has not authenticated"
    if user not in (None, DEFAULT, identity.user):
        return f"the user is {identity.user!r}, not {user!r}"
    if keys.get("client-id") not in (None, DEFAULT, client_id):
        return f"the client-id is {client_id!r}, not {keys['client-id']!r}"
    if not client_id.startswith(prefix):
        return f"the client-id {client_id!r} does not begin with {prefix!r}"
    return None


def entity_of(values: Mapping[str, str | None]) -> str:
    """Return the entity of what has these values by their keys; None is left out."""
    known = ((key, value) for key, value in values.items() if value is not None)
    return ",".join(f"{key}={value.translate(ESCAPES)}" for key, value in known)


def quota_pause_name(keys: Mapping[str, str]) -> str:
    """Return the name of the pause with these keys. Raises ValueError as `check_rule_keys`."""
    if not keys:
        return ALL_CLIENTS
    check_rule_keys(keys, CLIENT_KEYS)
    return format_selector(keys)


@dataclass(frozen=True, slots=True)
class QuotaPause:
    """Clients that have all of its keys are measured, and held for nothing, until a time."""

    keys: Mapping[str, str]
    """As those of a rule; none: every client."""
    until_s: float
    """In seconds of the Unix epoch, as all times here."""
    by: str | None = None
    """Who made it; None when not known."""
    at_s: float | None = None
    """When; None when not known."""

    @property
    def name(self) -> str:
        """Its selector, or `ALL_CLIENTS`. Raises ValueError for keys that are not of a rule."""
        return quota_pause_name(self.keys)

    def fits(self, identity: ClientIdentity) -> bool:
        """Return whether the client has all of its keys."""
        return rule_mismatch(self.keys, identity) is None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveSettings:
    """How a streaming query's bound follows its batches. The configuration checks the ranges."""

    batch_interval_ms: float | None = None
    """The query's processing-time trigger; above 0. None: it is learnt from the reports."""
    estimator: Literal["cost", "pid"] = "cost"
    """What makes a rate of batches: CostEstimator, or PidEstimator, which alone has the gains."""
    min_rate: float = 100.0
    """Records per second, above 0."""
    max_rate: float | None = None
    """Records per second, at least `min_rate`."""
    proportional: float = 1.0
    """Gain for the error; 0 or more, as all gains."""
    integral: float = 0.2
    """Gain for the scheduling delay, the error added up."""
    derivative: float = 0.0
    """Gain for the change of the error."""
    initial_rate: float | None = None
    """Records per second, `min_rate` to `max_rate`, until a rate is known; None: a slow start."""
    hold_ms: float = 30_000.0
    """How long the bound stays when reports stop; above 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleKeys(SettingsBase):
    """Whom a rule is for, whether they have one sensor each or one together, and are held."""

    user: Text | None = None
    client_id: Text | None = None
    client_id_prefix: Prefix | None = None
    listener: Text | None = None
    topic: Topic | None = None
    """Of which alone the bytes count."""
    topic_prefix: TopicPrefix | None = None
    scope: Literal["each", "shared"] = "each"
    """`each`: every value of the keys has a sensor of its own; `shared`: one for all."""
    enforce: StrictBool = True
    """False: what is above the bounds is counted, and held for nothing."""

    @property
    def keys(self) -> dict[str, str]:
        """The keys that the rule names, under their names in the configuration."""
        client_keys = self.listener, self.user, self.client_id, self.client_id_prefix
        values = (*client_keys, self.topic, self.topic_prefix)
        return {key: value for key, value in zip(KEYS, values, strict=True) if value is not None}

    @property
    def is_open(self) -> bool:
        """True when clients decide how many entities the rule has."""
        keys = self.keys
        is_for_many = DEFAULT in keys.values() or not PREFIX_KEYS.isdisjoint(keys)
        return self.scope == "each" and (is_for_many or self.names_only_a_listener)

    @property
    def names_only_a_listener(self) -> bool:
        """Whether each client that comes in by the listener counts by itself."""
        return set(self.keys) == {"listener"}

    def fields_of_keys(self) -> dict[str, Any]:
        """Return the values of the fields of this class."""
        return {each.name: getattr(self, each.name) for each in fields(RuleKeys)}

    def find_problems(self, bounds: Collection[str], **has: bool) -> Iterator[BadValueError]:
        """Yield what is wrong with a rule of these keys; `has` as for `find_bound_conflicts`."""
        yield from find_key_problems(self.keys)
        yield from find_bound_conflicts(self.keys, bounds, shared=self.scope == "shared", **has)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule(RuleKeys):
    """Bounds for the clients that have all the keys which the rule names.

    DEFAULT stands for any user that has authenticated. Raises ValueError as `validation`.
    """

    bounds: Mapping[QuotaKind, float]
    """In the unit of each kind; only for the kinds that the rule limits."""
    place: str = ""
    """Where the rule stands, such as `quota-proxy.yaml:12`."""
    number: int = 0
    """Its position in the configuration; of two rules with the same keys the lower one wins."""
    adaptive: AdaptiveSettings | None = None
    expected: bool = False
    """Whether its clients are expected to be at their bound: no alert is raised for that."""
    share: "Share | None" = None
    """Of a budget; each entity of the rule has one. None: its clients share no budget."""
    when: Schedule | None = None
    """When it is in force; None: always."""
    ceilings: Mapping[QuotaKind, float] = field(init=False, repr=False, compare=False)
    """The most that its clients can have: by `bounds`, and by the budgets that they are in."""
    entity_keys: frozenset[str] = field(init=False, repr=False, compare=False)
    """What all traffic of one entity has in common: its listener, user, client-id or topic."""

    def __post_init__(self) -> None:
        try:
            parse_scope(self.scope)
            bounds = parse_quota_bounds(self.bounds)
        except BadValueError as error:
            raise ValueError(f"{self.title}: {error.message}: {error.fix}") from None
        of_budget = self.share.budget.ceilings if self.share else {}
        is_adaptive = self.adaptive is not None
        for problem in self.find_problems(bounds, adaptive=is_adaptive, shares=bool(of_budget)):
            place = f"{self.title}: {problem.key}" if problem.key else self.title
            raise ValueError(f"{place} {problem.message}: {problem.fix}")
        object.__setattr__(self, "bounds", MappingProxyType(bounds))
        most = dict(bounds)
        # What is not enforced bounds nobody, but says of what there is a rate.
        for each in sorted(self.budgets_around(), key=lambda each: not each.enforce):
            for kind, rate in each.bounds.items():
                most[kind] = (
                    min(rate, most.get(kind, rate)) if each.enforce else most.get(kind, rate)
                )
        object.__setattr__(self, "ceilings", MappingProxyType(most))
        object.__setattr__(self, "entity_keys", frozenset(self._entity_keys()))

    def document(self) -> dict[str, Any]:
        """Return what clients are held to as a JSON object, without where the rule stands."""
        values = {**self.fields_of_keys(), "expected": self.expected}
        named = {name: value for name, value in values.items() if value is not None}
        bounds = {kind.value: bound for kind, bound in self.bounds.items()}
        adaptive = asdict(self.adaptive) if self.adaptive else None
        more = {"share": self.share, "when": self.when}
        documents = {name: each.document() for name, each in more.items() if each is not None}
        return {**named, "bounds": bounds, "adaptive": adaptive, **documents}

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Self:
        """Read a `document`. Raises ValueError, KeyError or TypeError for anything else."""
        bounds = {QuotaKind(kind): bound for kind, bound in document["bounds"].items()}
        told = document["adaptive"]
        adaptive = None
        if told:  # earlier releases only wrote whether there is such a bound
            adaptive = AdaptiveSettings() if told is True else AdaptiveSettings(**told)
        readers = ("share", Share.of), ("when", Schedule.of)
        more = {name: read(document[name]) for name, read in readers if name in document}
        return cls(**{**document, "bounds": bounds, "adaptive": adaptive, **more})

    @property
    def selector(self) -> str:
        """Its keys in one line. Raises ValueError as `check_rule_keys`."""
        return format_selector(self.keys)

    @property
    def title(self) -> str:
        """The rule's number and place, for people."""
        return f"rule {self.number} ({self.place})" if self.place else f"rule {self.number}"

    @property
    def named(self) -> Named:
        """User, client id or prefix, and listener; None for what the rule leaves open."""
        client_id = self.client_id_prefix
        if client_id is None and self.client_id != DEFAULT:
            client_id = self.client_id
        return None if self.user == DEFAULT else self.user, client_id, self.listener

    @property
    def rank(self) -> Rank:
        """Position in the order of precedence; the smaller one comes first.

        By the user (exact, default, not named), the client id (exact, a longer prefix, a shorter
        one, not named although a listener is, default, not named), and the listener (named, not
        named).
        """
        levels = {None: UNNAMED, DEFAULT: ANY}
        listener = UNNAMED if self.listener is None else EXACT
        if self.client_id_prefix is not None:
            client = PREFIX
        elif self.client_id is None and self.listener is not None:
            client = LISTENER_ONLY
        else:
            client = levels.get(self.client_id, EXACT)
        user = levels.get(self.user, EXACT)
        return user, client, -len(self.client_id_prefix or ""), listener

    @property
    def order(self) -> tuple[TopicRank, Rank]:
        """Position among all rules; those that name a topic come last."""
        return self.topic_rank, self.rank

    @property
    def topic_rank(self) -> TopicRank:
        """Position among the rules for a topic, before `rank`; those for all topics are apart.

        By the topic: exact, a longer prefix, a shorter one.
        """
        if self.topic_prefix is not None:
            return PREFIX, -len(self.topic_prefix)
        return (ALL_TOPICS if self.topic is None else EXACT), 0

    @property
    def is_by_topic(self) -> bool:
        """Whether only the bytes of some topics count."""
        return bool(self.topic_or_prefix)

    @property
    def topic_or_prefix(self) -> str:
        """The topic that it names, or how those begin that it is for; empty: all topics."""
        return self.topic or self.topic_prefix or ""

    def budgets_around(self) -> "Iterator[Budget]":
        """Yield the budgets that its clients are in, the innermost first."""
        share = self.share
        while share is not None:
            yield share.budget
            share = share.budget.share

    def _entity_keys(self) -> set[str]:
        if self.scope == "shared":
            exact = self.keys.keys() - PREFIX_KEYS
            return {key for key in exact if self.keys[key] != DEFAULT}
        if self.names_only_a_listener:
            return {"listener", "user", "client-id"}
        return {key.removesuffix("-prefix") for key in self.keys}

    def covers(self, pause: QuotaPause) -> bool:
        """Return whether a pause that fits a client fits all clients of the same entity."""
        if self.scope == "shared":
            return pause.keys.items() <= self.keys.items()
        return {key.removesuffix("-prefix") for key in pause.keys} <= self.entity_keys

    @property
    def shared_entity(self) -> str:
        """The entity that stands for all clients of the rule: its own keys."""
        return ",".join(
            f"{key}={value if value == DEFAULT else value.translate(ESCAPES)}"
            for key, value in self.keys.items()
        )

    def names(self, identity: ClientIdentity) -> bool:
        """Return whether the user, the client id or a prefix of it stands in the rule."""
        client_id, prefix = identity.client_id or "", self.client_id_prefix
        return (
            (self.user is not None and self.user == identity.user)
            or self.client_id == client_id
            or (prefix is not None and client_id.startswith(prefix))
        )

    def entity(self, identity: ClientIdentity, topic: str | None = None) -> str:
        """Return whose traffic is added up with this client's, of a topic if the rule names any.

        With scope `each` these are the client's values for the rule's keys, as in Kafka: all client
        ids of alice share the entity `user=alice`. A rule of a listener alone counts each client by
        itself.
        """
        if self.scope == "shared":
            return self.shared_entity
        named = self.entity_keys
        values = {"listener": identity.listener, "user": identity.user}
        values |= {"client-id": identity.client_id or "", "topic": topic}
        return entity_of({key: value for key, value in values.items() if key in named})


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget(Rule):
    """A rate that all clients of some rules have together; it may be part of another budget.

    As a rule with scope `shared`, but for the clients of the rules that name it.
    """

    name: str
    scope: Literal["each", "shared"] = "shared"

    @property
    def title(self) -> str:
        """Its name and place, for people."""
        return f"budget {self.name} ({self.place})" if self.place else f"budget {self.name}"

    @property
    def keys(self) -> dict[str, str]:
        """What stands for the clients of its rules."""
        return {"budget": self.name}

    def document(self) -> dict[str, Any]:
        """See Rule."""
        return {**Rule.document(self), "name": self.name}


@dataclass(frozen=True, slots=True)
class Share:
    """What an entity has of a budget: weighted max-min fairness above a guarantee."""

    budget: Budget
    weight: float = 1.0
    """Above 0."""
    guaranteed: float = 0.0
    """Bytes per second, in each direction that the budget bounds: a floor, not on top."""

    def below(self, bounds: Mapping[QuotaKind, float]) -> "Share":
        """Return the share of one with these bounds, which guarantees no more than those."""
        most = (bounds[kind] for kind in self.budget.ceilings if kind in bounds)
        return replace(self, guaranteed=min((self.guaranteed, *most)))

    def document(self) -> dict[str, Any]:
        """Return it as JSON has it; `of` reads that."""
        budget = self.budget.document()
        return {"budget": budget, "weight": self.weight, "guaranteed": self.guaranteed}

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Self:
        """Read a `document`. Raises as `Rule.of`."""
        return cls(**{**document, "budget": Budget.of(document["budget"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaManagerSettings:
    """The rules and how they are measured. The configuration checks the ranges."""

    rules: tuple[Rule, ...] = ()
    window_ms: float = 1000.0
    """At least 1."""
    samples: int = 11
    """How many windows a rate looks back on; at least 2."""
    burst_ms: float | None = None
    """How much of its bound a client that was quiet may take at once; 0 or more. None: what the
    formula lets pass, which is worked off, and DEFAULT_BURST_MS while it is held."""
    max_delay_ms: float = 20_000.0
    """The longest single hold; above 0. Clients give up after 30 s."""
    enforce: bool = True
    """False: as `Rule.enforce`, for all rules."""
    max_client_entities: int = 10_000
    """For how many clients each kind of quota keeps a sensor of their own; at least 1."""

    @property
    def span_ms(self) -> float:
        """How far a rate looks back at most."""
        return self.window_ms * self.samples

    @property
    def observed_rules(self) -> int:
        """How many rules are measured and hold nobody."""
        return sum(not (self.enforce and rule.enforce) for rule in self.rules)

    def longest_hold_ms(self, kind: QuotaKind) -> float:
        """Return the longest single hold for a quota: of time in requests one window, as Kafka."""
        return min(self.window_ms, self.max_delay_ms) if kind.is_time else self.max_delay_ms


@dataclass(frozen=True, slots=True)
class RuleMatch:
    """The rule that bounds one kind of a client's traffic, and whose traffic is added up."""

    rule: Rule
    entity: str
    enforced: bool = True
    """False: the client is measured, and held for nothing."""


class ConsideredRule(NamedTuple):
    """A rule that was looked at for a client, and what came of it."""

    rule: Rule
    kind: QuotaKind
    chosen: bool
    reason: str
    """For people; a part of a sentence."""


def _place_of(identity: ClientIdentity, rank: Rank) -> Named | None:
    """Return where a client stands among the rules of a rank; None if none of them is for it."""
    user, client, minus_length, listener = rank
    if user != UNNAMED and identity.user is None:
        return None
    named = None
    if client == EXACT:
        named = identity.client_id or ""
    elif client == PREFIX:
        named = (identity.client_id or "")[:-minus_length]
    return (
        identity.user if user == EXACT else None,
        named,
        identity.listener if listener == EXACT else None,
    )


def guarantee_sums_by_budget(rules: Iterable[Rule]) -> tuple[tuple[Budget, float], ...]:
    """Return the budgets of rules, each before those in it, with the sums of their guarantees."""
    found: dict[str, tuple[list[int], Budget, float]] = {}
    for rule in rules:
        inner_first = list(rule.budgets_around())
        for at, budget in enumerate(inner_first):
            numbers = [each.number for each in reversed(inner_first[at:])]
            guaranteed = rule.share.guaranteed if rule.share is not None else 0.0
            _, _, before = found.get(budget.name, (numbers, budget, 0.0))
            found[budget.name] = numbers, budget, before + guaranteed
    in_order = sorted(found.values(), key=lambda each: (each[0], each[1].name))
    return tuple((budget, guaranteed) for _, budget, guaranteed in in_order)


_Places = dict[tuple[TopicRank, Rank], dict[Named, dict[str, Rule]]]
"""Rules in order of precedence: where clients stand, and there by topic, prefix or, empty, all."""


class RuleTable:
    """All rules in order of precedence; in each rank a client can stand in one place only.

    Without `enforce` no client is held to any, nor are those for whom there is a pause.
    """

    def __init__(
        self, rules: Iterable[Rule], *, enforce: bool = True, pauses: Iterable[QuotaPause] = ()
    ) -> None:
        self._enforce = enforce
        self.pauses = tuple(pauses)
        self.rules = tuple(sorted(rules, key=lambda rule: (*rule.order, rule.number)))
        self.budgets = guarantee_sums_by_budget(self.rules)
        """The budgets that they share, each before those in it, and what it guarantees in all."""
        self._by_kind = {
            kind: tuple(
                rule for rule in self.rules if kind in rule.ceilings and not rule.is_by_topic
            )
            for kind in QuotaKind
        }
        self._last_open = {
            kind: rule for kind, rules in self._by_kind.items() for rule in rules if rule.is_open
        }
        self._places: dict[tuple[QuotaKind, bool], _Places] = {}
        """Those of all topics, and (True) of some."""
        for rule in self.rules:
            order, named = rule.order, rule.named
            for kind in rule.ceilings:
                places = self._places.setdefault((kind, rule.is_by_topic), {}).setdefault(order, {})
                places.setdefault(named, {}).setdefault(rule.topic_or_prefix, rule)

    def _rules_for(
        self, kind: QuotaKind, identity: ClientIdentity, *, by_topic: bool
    ) -> Iterator[tuple[TopicRank, Mapping[str, Rule]]]:
        """Yield the rules for this client by topic or prefix, in order of precedence."""
        for (topic_rank, rank), places in self._places.get((kind, by_topic), {}).items():
            place = _place_of(identity, rank)
            if place is not None and place in places:
                yield topic_rank, places[place]

    def match(
        self, kind: QuotaKind, identity: ClientIdentity, topic: str | None = None
    ) -> RuleMatch | None:
        """Return the first rule for this client that bounds this kind, or None.

        That is of all topics together, or of one by the rules that name topics.
        """
        name = topic or ""
        by_topic = topic is not None
        for (_, minus_length), rules in self._rules_for(kind, identity, by_topic=by_topic):
            rule = rules.get(name[:-minus_length] if minus_length else name)
            if rule is not None:
                return self._match(rule, identity, topic)
        return None

    def has_topics(self, kind: QuotaKind, identity: ClientIdentity) -> bool:
        """Return whether a rule bounds this kind of some topic for this client."""
        return any(self._rules_for(kind, identity, by_topic=True))

    def rules_by_topic(self, kind: QuotaKind, identity: ClientIdentity) -> list[Rule]:
        """Return for each topic, or prefix, that rules name the first for this client."""
        found: dict[tuple[TopicRank, str], Rule] = {}
        for topic_rank, rules in self._rules_for(kind, identity, by_topic=True):
            for topic, rule in rules.items():
                found.setdefault((topic_rank, topic), rule)
        return list(found.values())

    def _match(self, rule: Rule, identity: ClientIdentity, topic: str | None = None) -> RuleMatch:
        """Return what a rule that fits a client comes to."""
        entity, enforced = rule.entity(identity, topic), self._enforce and rule.enforce
        if enforced and self.pauses:
            pauses = [pause for pause in self.pauses if pause.fits(identity)]
            enforced = not pauses
            if pauses and not any(map(rule.covers, pauses)):
                entity += PAUSED
        return RuleMatch(rule, entity, enforced)

    def depends_on_user(self, kind: QuotaKind) -> bool:
        """Return whether a login can change which rule bounds this kind of a client's."""
        ranks = self._places.get((kind, False), {})
        return any(user != UNNAMED for _, (user, *_) in ranks)

    def overflow_entity(self, kind: QuotaKind, match: RuleMatch) -> str:
        """Return whose sensor clients without room share; those that are paused have their own."""
        rule = match.rule
        entity = OTHER if rule is self._last_open.get(kind) else f"{OTHER},{rule.shared_entity}"
        return f"{entity}{PAUSED}" if self.pauses and not match.enforced else entity

    def explain(self, identity: ClientIdentity) -> list[ConsideredRule]:
        """Return for each kind in turn the rules that bound it, in order of precedence, and why.

        Of those not for this client at most MAX_MISMATCHES for each kind: first those that name its
        user or client id and something else, too.
        """
        considered: list[ConsideredRule] = []
        for kind, rules in self._by_kind.items():
            reasons = [rule_mismatch(rule.keys, identity) for rule in rules]
            mismatches = (
                (not rules[at].names(identity), at) for at, reason in enumerate(reasons) if reason
            )
            shown = {at for _, at in nsmallest(MAX_MISMATCHES, mismatches)}
            first = ""
            for at, (rule, unfit) in enumerate(zip(rules, reasons, strict=True)):
                if unfit and at not in shown:
                    continue
                is_chosen, why = not (unfit or first), unfit or f"{first} comes first"
                if is_chosen:
                    first, match = rule.title, self._match(rule, identity)
                    why = f"applies to {match.entity}"
                    why += "" if match.enforced else ", is not enforced"
                considered.append(ConsideredRule(rule, kind, is_chosen, why))
        return considered

    def count(self, kind: QuotaKind) -> int:
        """Return how many rules bound this kind."""
        return len(self._by_kind[kind])
