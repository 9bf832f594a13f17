"""What the proxy has to know about each API and version, taken from kafka-python's schemas."""

from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from struct import pack_into
from typing import Any, Literal, TypeAlias

from kafka.protocol import admin, consumer, metadata, producer, sasl
from kafka.protocol.api_key import ApiKey

PRODUCE = 0
FETCH = 1
LIST_OFFSETS = 2
METADATA = 3
CONTROLLED_SHUTDOWN = 7
FIND_COORDINATOR = 10
JOIN_GROUP = 11
LIST_GROUPS = 16
SASL_HANDSHAKE = 17
API_VERSIONS = 18
DESCRIBE_CONFIGS = 32
DESCRIBE_LOG_DIRS = 35
SASL_AUTHENTICATE = 36
DESCRIBE_CLUSTER = 60
LIST_TRANSACTIONS = 66

LENGTH_BYTES = 4
"""Every frame starts with its length, which does not count itself."""

RESPONSE_HEADER_BYTES = 8
"""Length and correlation id. A flexible header goes on with a tag section, one byte if empty."""

ApiFamily: TypeAlias = Literal["fetch", "produce", "request"]
"""Whose held responses wait together: Fetch, Produce and all others have a delay queue each."""

_API_VERSION_OFFSET = 6  # in a request frame, behind the length and the API key
_UNSUPPORTED_VERSION = 2**15 - 1
_NO_VERSION = -1  # below every version there can be
_NEVER = 2**15  # above every version there can be
_CACHED_PLANS = 4096  # a bound: pairs of API and version come from clients and may be anything


class Handling(Enum):
    """What has to be done with the response to a request."""

    PASS = "pass"
    """Nothing: it carries no broker's address."""
    REWRITE = "rewrite"
    """Put the response, or its start, through `rewriting`: broker addresses, versions."""
    PER_BROKER = "per broker"
    """Nothing, but to settings `without_config_addresses`; at the fallback put it through
    `empty_broker_response`: tools ask each broker, and add up."""
    REFUSE = "refuse"
    """It may carry addresses that could not be found, so the request must not reach a broker."""
    UNKNOWN = "unknown"
    """An API that was made after this table: refused, or passed if the configuration says so."""


@dataclass(frozen=True, slots=True)
class Api:
    """What is known of one API in all of its versions."""

    key: int
    max_version: int = _NO_VERSION
    """The last version that clients may use, -1 for none; 0 is the first. That of the schemas, or
    the last one that was reviewed."""
    last_offered: int | None = None
    """The last version in ApiVersions responses; None: `max_version`. A client that asks for none
    may use later ones: the broker is asked in this one, see `forwarded_api_version`."""
    request: Any = None
    """Its message class, and that of the response, of kafka-python; None without a schema."""
    response: Any = None
    first_with_addresses: int = _NEVER
    """The first version whose responses carry broker addresses."""
    first_throttled_by_client: int = _NEVER
    """The first version whose clients hold back by themselves for the throttle time that a
    response names (KIP-219); known only of the APIs that byte rates bound."""
    family: ApiFamily = "request"
    byte_rate: str | None = None
    """The quota type at whose gate requests wait, as the configuration names it."""
    is_login: bool = False
    """Whether its messages say who the client is."""
    is_hidden: bool = False
    """Whether no client may use it, schema or not."""
    is_per_broker: bool = False
    """Whether tools ask each broker what it has itself."""
    is_membership: bool = False
    """Whether a late answer may cost the client its place in a group."""


@dataclass(frozen=True, slots=True)
class ApiPlan:
    """What is done with the requests and responses of one API and version."""

    api: Api
    handling: Handling
    takes_whole: bool
    """The response is taken into memory before it is sent on."""
    rewrites_head: bool
    """So is only the start of the response, up to `brokers_end`: it names no address behind."""
    passes: bool
    """The response is neither taken into memory nor walked."""
    costs_time: bool
    """The service time counts for `request_percentage`."""
    request_is_flexible: bool
    """The request's header ends with a tag section; False when not known."""
    is_flexible: bool
    """The response's header ends with a tag section, whose one byte is 0 when it is empty; False
    when not known."""
    body_offset: int
    """Where the body starts in the response frame when that section is empty, as brokers have sent
    it so far. Check that the byte before it is 0 when `is_flexible`."""
    throttle_offset: int
    """Where throttle_time_ms (int32) lies in the response frame when that section is empty. 0
    where it is not the body's first field, or the API and version are not known."""
    clients_throttle: bool
    """Clients hold back by themselves for the throttle time (KIP-219)."""


_FACTS = (
    Api(
        PRODUCE,
        first_with_addresses=10,
        first_throttled_by_client=6,
        family="produce",
        byte_rate="producer_byte_rate",
    ),
    Api(
        FETCH,
        # Later ones are the same but for leader hints (KIP-951), which carry addresses
        # (docs/decisions/05-leader-hints.md).
        last_offered=15,
        first_throttled_by_client=8,
        family="fetch",
        byte_rate="consumer_byte_rate",
    ),
    Api(METADATA, first_with_addresses=0),
    Api(FIND_COORDINATOR, first_with_addresses=0),
    Api(DESCRIBE_CLUSTER, first_with_addresses=0),
    Api(LIST_GROUPS, is_per_broker=True),
    Api(DESCRIBE_CONFIGS, is_per_broker=True),
    Api(DESCRIBE_LOG_DIRS, is_per_broker=True),
    Api(LIST_TRANSACTIONS, is_per_broker=True),
    Api(SASL_HANDSHAKE, is_login=True),
    Api(SASL_AUTHENTICATE, is_login=True),
    Api(JOIN_GROUP, is_membership=True),
    Api(ApiKey.Heartbeat, is_membership=True),
    Api(ApiKey.LeaveGroup, is_membership=True),
    Api(ApiKey.SyncGroup, is_membership=True),
    # Without a schema. Their responses name no broker, as Kafka 4.1's own message definitions have
    # it, up to this version.
    Api(ApiKey.CreateDelegationToken, 3),
    Api(ApiKey.RenewDelegationToken, 2),
    Api(ApiKey.ExpireDelegationToken, 2),
    Api(ApiKey.DescribeDelegationToken, 3),
    Api(ApiKey.UnregisterBroker, 0),
    Api(ApiKey.ConsumerGroupHeartbeat, 1, is_membership=True),
    Api(ApiKey.ConsumerGroupDescribe, 1),  # hosts of members
    Api(ApiKey.GetTelemetrySubscriptions, 0),
    Api(ApiKey.PushTelemetry, 0),
    Api(ApiKey.ShareGroupDescribe, 1),  # hosts of members
    Api(ApiKey.AddRaftVoter, 0),  # controllers' addresses, in the request only
    Api(ApiKey.RemoveRaftVoter, 0),
    # Endpoints that the applications name themselves, and hosts of members.
    Api(ApiKey.StreamsGroupHeartbeat, 0, is_membership=True),
    Api(ApiKey.StreamsGroupDescribe, 0),
    Api(ApiKey.DescribeShareGroupOffsets, 0),
    Api(ApiKey.AlterShareGroupOffsets, 0),
    Api(ApiKey.DeleteShareGroupOffsets, 0),
    # What a share consumer needs: never offered, and refused when used. The last two answer with
    # node endpoints that no schema here can find: a client that learned one would go round its
    # quota. With the first alone it would join its group and wait for ever; without it, it says at
    # once that there are no share groups here. To describe such groups and to set their offsets
    # needs none of the three, and stays: the members may be connected to the cluster itself.
    Api(ApiKey.ShareGroupHeartbeat, is_hidden=True, is_membership=True),
    Api(ApiKey.ShareFetch, is_hidden=True),
    Api(ApiKey.ShareAcknowledge, is_hidden=True),
)
"""Every API of which more is known than its schemas say, or that has none. Not here and without a
schema, so unknown: what only brokers and controllers ask each other (4 to 7, 52 to 54, 56, 58, 59,
62, 63, 67, 70, 73, 82 to 87)."""


def _load() -> dict[int, Api]:
    """Return the facts of every API, with kafka-python's schemas where it has both."""
    messages: dict[tuple[int, bool], Any] = {}
    for module in (admin, consumer, metadata, producer, sasl):
        for name in module.__all__:
            message = getattr(module, name)
            if hasattr(message, "API_KEY"):
                messages[message.API_KEY, message.is_request()] = message
    apis = {int(api.key): api for api in _FACTS}
    for (key, is_request), request in sorted(messages.items()):
        if is_request and (key, False) in messages:
            api, response = apis.get(key, Api(key)), messages[key, False]
            last = _NO_VERSION if api.is_hidden else response.max_version
            apis[key] = replace(api, max_version=last, request=request, response=response)
    return apis


KNOWN_APIS = _load()
"""All that is known, by API key: also what has no schema, and what is hidden."""

_UNKNOWN = Api(_NO_VERSION)
_NAMES: dict[int, str] = {key.value: key.name for key in ApiKey}

APIS = {key: api for key, api in KNOWN_APIS.items() if api.request is not None}
"""Every API that has both schemas, by its key."""


def is_known(api_key: int, version: int) -> bool:
    """Return whether there is a schema for this API and version."""
    return api_key in APIS and 0 <= version <= APIS[api_key].max_version


def api_of(api_key: int) -> Api:
    """Return what is known of an API; of one that is not known, that nothing is."""
    return KNOWN_APIS.get(api_key, _UNKNOWN)


def api_name(api_key: int) -> str:
    """Return Kafka's name of the API, or "unknown": a bounded set, fit for a metric label."""
    return _NAMES.get(api_key, "unknown")


def last_offered_version(api_key: int, *, passes_unknown: bool = False) -> int | None:
    """Return the last version to offer; -1: none; None: any (`passes_unknown`)."""
    api = api_of(api_key)
    if passes_unknown and api is _UNKNOWN:
        return None
    return api.max_version if api.last_offered is None else api.last_offered


def message_schema(message: Any) -> Any:
    """Return the fields of a request or response of kafka-python, of all its versions."""
    return message._struct  # noqa: SLF001 - it has no public name


@lru_cache(maxsize=_CACHED_PLANS)
def plan_of(api_key: int, version: int) -> ApiPlan:
    """Return the plan of any API and version."""
    api = api_of(api_key)
    has_schema = is_known(api_key, version)
    if api_key == API_VERSIONS:
        handling = Handling.REWRITE
    elif api is _UNKNOWN:
        handling = Handling.UNKNOWN
    elif not 0 <= version <= api.max_version:
        handling = Handling.REFUSE
    elif version < api.first_with_addresses:
        handling = Handling.PER_BROKER if api.is_per_broker else Handling.PASS
    else:
        handling = Handling.REWRITE
    # ApiVersions has no tag section, so that a client can read the answer to a version that the
    # broker does not know (KIP-511).
    has_tags = has_schema and api_key != API_VERSIONS
    is_flexible = has_tags and bool(api.response.flexible_version_q(version))
    body_offset = RESPONSE_HEADER_BYTES + is_flexible
    fields = message_schema(api.response).untagged_fields(version) if has_schema else ()
    starts_with_throttle = any(field.name == "throttle_time_ms" for field in fields[:1])
    return ApiPlan(
        api=api,
        handling=handling,
        takes_whole=(
            api.is_login
            or (handling is Handling.REWRITE and api_key != METADATA)
            or (handling is Handling.PER_BROKER and api_key == DESCRIBE_CONFIGS)
        ),
        rewrites_head=handling is Handling.REWRITE and api_key == METADATA,
        passes=not api.is_login and handling in (Handling.PASS, Handling.UNKNOWN),
        costs_time=not (api.is_login or api.is_membership),
        request_is_flexible=has_schema and bool(api.request.flexible_version_q(version)),
        is_flexible=is_flexible,
        body_offset=body_offset,
        throttle_offset=body_offset if starts_with_throttle else 0,
        clients_throttle=version >= api.first_throttled_by_client,
    )


def forwarded_api_version(api_key: int, version: int) -> int:
    """Return the version in which a broker is asked for what a client asks in this one.

    A later Fetch than is offered is the same as the last one that is, and so is its response. For
    ApiVersions above the schemas' last version it is one that no broker knows. The broker then
    answers UNSUPPORTED_VERSION (35) in the layout of version 0 with the versions that it does
    support (KIP-511), and the client asks again.
    """
    if api_key == API_VERSIONS and not is_known(api_key, version):
        return _UNSUPPORTED_VERSION
    last = api_of(api_key).last_offered
    return version if last is None else min(version, last)


def set_request_version(frame: bytearray | memoryview, version: int) -> None:
    """Have a request ask in another version."""
    pack_into(">h", frame, _API_VERSION_OFFSET, version)
