"""What the proxy has to know about each API and version, taken from kafka-python's schemas."""

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from struct import pack_into
from typing import Any

from kafka.protocol import admin, consumer, metadata, producer, sasl
from kafka.protocol.api_key import ApiKey

PRODUCE = 0
FETCH = 1
LIST_OFFSETS = 2
METADATA = 3
CONTROLLED_SHUTDOWN = 7
FIND_COORDINATOR = 10
JOIN_GROUP = 11
SASL_HANDSHAKE = 17
API_VERSIONS = 18
SASL_AUTHENTICATE = 36
DESCRIBE_CLUSTER = 60

ADDRESS_APIS = {PRODUCE: 10, FETCH: 16, METADATA: 0, FIND_COORDINATOR: 0, DESCRIBE_CLUSTER: 0}
"""APIs whose responses carry broker addresses, and the first version that does."""

HIDDEN_APIS = frozenset(
    key.value for key in (ApiKey.ShareGroupHeartbeat, ApiKey.ShareFetch, ApiKey.ShareAcknowledge)
)
"""What a share consumer needs. The last two answer with node endpoints that no schema here can
find: a client that learned one would go round its quota. With the first alone it would join its
group and wait for ever; without it, it says at once that there are no share groups here. To
describe such groups and to set their offsets (77, 90 to 92) needs none of the three, and stays: the
members may be connected to the cluster itself. They are never offered, and refused when used."""

REVIEWED_APIS = {
    ApiKey.CreateDelegationToken.value: 3,
    ApiKey.RenewDelegationToken.value: 2,
    ApiKey.ExpireDelegationToken.value: 2,
    ApiKey.DescribeDelegationToken.value: 3,
    ApiKey.UnregisterBroker.value: 0,
    ApiKey.ConsumerGroupHeartbeat.value: 1,
    ApiKey.ConsumerGroupDescribe.value: 1,  # hosts of members
    ApiKey.GetTelemetrySubscriptions.value: 0,
    ApiKey.PushTelemetry.value: 0,
    ApiKey.ShareGroupDescribe.value: 1,  # hosts of members
    ApiKey.AddRaftVoter.value: 0,  # controllers' addresses, in the request only
    ApiKey.RemoveRaftVoter.value: 0,
    ApiKey.StreamsGroupHeartbeat.value: 0,  # endpoints that the applications name themselves
    ApiKey.StreamsGroupDescribe.value: 0,  # the same, and hosts of members
    ApiKey.DescribeShareGroupOffsets.value: 0,
    ApiKey.AlterShareGroupOffsets.value: 0,
    ApiKey.DeleteShareGroupOffsets.value: 0,
}
"""APIs without a schema whose responses name no broker, and the last version that was read for it:
that of Kafka 4.1, in its own message definitions. Not here, and so unknown: what only brokers and
controllers ask each other (4 to 7, 52 to 54, 56, 58, 59, 62, 63, 67, 70, 73, 82 to 87)."""

UNKNOWN_API_NAME = "unknown"

LENGTH_BYTES = 4
"""Every frame starts with its length, which does not count itself."""

RESPONSE_HEADER_BYTES = 8
"""Length and correlation id. A flexible header goes on with a tag section."""

EMPTY_TAG_SECTION_BYTES = 1

_MEMBERSHIP_APIS = frozenset(
    key.value
    for key in (
        ApiKey.JoinGroup,
        ApiKey.Heartbeat,
        ApiKey.LeaveGroup,
        ApiKey.SyncGroup,
        ApiKey.ConsumerGroupHeartbeat,
        ApiKey.ShareGroupHeartbeat,
        ApiKey.StreamsGroupHeartbeat,
    )
)

_FIRST_WAITING_VERSION = {PRODUCE: 6, FETCH: 8}

_API_VERSION_OFFSET = 6
"""Of the API version in a request frame: behind the length and the API key."""

_UNSUPPORTED_VERSION = 2**15 - 1

_NO_VERSION = -1
"""Below every version there can be."""

_NEVER = 2**15
"""Above every version there can be."""

_CACHED_PAIRS = 4096
"""Bounds the caches: pairs of API and version come from clients and may be anything."""


class Handling(Enum):
    """What has to be done with the response to a request."""

    PASS = "pass"
    """Nothing: it carries no broker's address."""

    REWRITE = "rewrite"
    """Take the whole response and put it through `rewrite_response`."""

    WALK = "walk"
    """Let it pass through a `FetchWalker` and neutralise its tail."""

    API_VERSIONS = "api_versions"
    """Take the whole response and cap it with `rewrite_response`."""

    REFUSE = "refuse"
    """It may carry addresses that could not be found, so the request must not reach a broker."""

    UNKNOWN = "unknown"
    """An API that was made after this table: refused, or passed if the configuration says so."""


@dataclass(frozen=True, slots=True)
class Api:
    """The two messages of one API as kafka-python describes them."""

    request: Any
    """The request's message class."""

    response: Any
    """The response's message class."""

    max_version: int
    """The last version that the schemas know; 0 is the first."""


def _load() -> dict[int, Api]:
    messages: dict[tuple[int, bool], Any] = {}
    for module in (admin, consumer, metadata, producer, sasl):
        for name in module.__all__:
            message = getattr(module, name)
            if hasattr(message, "API_KEY"):
                messages[message.API_KEY, message.is_request()] = message
    return {
        key: Api(request, messages[key, False], messages[key, False].max_version)
        for (key, is_request), request in sorted(messages.items())
        if is_request and (key, False) in messages
    }


APIS = _load()
"""Every API that has both schemas, by its key."""


def is_known(api_key: int, version: int) -> bool:
    """Say whether there is a schema for this API and version."""
    api = APIS.get(api_key)
    return api is not None and 0 <= version <= api.max_version


_NAMES: dict[int, str] = {key.value: key.name for key in ApiKey}


def api_name(api_key: int) -> str:
    """Return Kafka's name of the API, or "unknown": a bounded set, fit for a metric label."""
    return _NAMES.get(api_key, UNKNOWN_API_NAME)


def max_safe_version(api_key: int, *, passes_unknown: bool = False) -> int | None:
    """Return the last version that clients may use, -1 where there is none.

    None stands for any: an API that is not known, with `passes_unknown`.
    """
    if api_key in HIDDEN_APIS:
        return _NO_VERSION
    if api_key in APIS:
        return APIS[api_key].max_version
    return REVIEWED_APIS.get(api_key, None if passes_unknown else _NO_VERSION)


@lru_cache(maxsize=_CACHED_PAIRS)
def request_is_flexible(api_key: int, version: int) -> bool:
    """Say whether the request's header ends with a tag section; False when not known."""
    return is_known(api_key, version) and bool(
        APIS[api_key].request.flexible_version_q(version),
    )


@lru_cache(maxsize=_CACHED_PAIRS)
def response_is_flexible(api_key: int, version: int) -> bool:
    """Say whether the response's header ends with a tag section; False when not known.

    ApiVersions never has one, so that a client can read the answer to a version that the broker
    does not know (KIP-511).
    """
    return (
        api_key != API_VERSIONS
        and is_known(api_key, version)
        and bool(APIS[api_key].response.flexible_version_q(version))
    )


@lru_cache(maxsize=_CACHED_PAIRS)
def response_body_offset(api_key: int, version: int) -> int:
    """Return where the body starts in a response frame whose header has no tagged fields.

    Brokers send none so far. A caller checks that the byte before the offset is 0 when
    `response_is_flexible`.
    """
    flexible = response_is_flexible(api_key, version)
    return RESPONSE_HEADER_BYTES + EMPTY_TAG_SECTION_BYTES * flexible


@lru_cache(maxsize=_CACHED_PAIRS)
def throttle_offset(api_key: int, version: int) -> int | None:
    """Return where throttle_time_ms (int32) lies in a response frame, counted from its length.

    None where it is not the body's first field, or the API and version are not known. Assumes an
    empty tag section in the header, see `response_body_offset`.
    """
    if not is_known(api_key, version):
        return None
    fields = APIS[api_key].response._struct.untagged_fields(version)
    if not fields or fields[0].name != "throttle_time_ms":
        return None
    return response_body_offset(api_key, version)


@lru_cache(maxsize=_CACHED_PAIRS)
def handling(api_key: int, version: int) -> Handling:
    """Decide what has to be done with a request of this API and version and its response."""
    if api_key == API_VERSIONS:
        return Handling.API_VERSIONS
    last = max_safe_version(api_key, passes_unknown=True)
    if last is None:
        return Handling.UNKNOWN
    if not 0 <= version <= last:
        return Handling.REFUSE
    if version < ADDRESS_APIS.get(api_key, _NEVER):
        return Handling.PASS
    return Handling.WALK if api_key == FETCH else Handling.REWRITE


def is_membership(api_key: int) -> bool:
    """Say whether a late answer may cost the client its place in a group."""
    return api_key in _MEMBERSHIP_APIS


def clients_wait(api_key: int, version: int) -> bool:
    """Say whether clients hold back by themselves for the throttle time they are told (KIP-219)."""
    first = _FIRST_WAITING_VERSION.get(api_key)
    return first is not None and version >= first


def downgrade_api_versions(frame: bytearray | memoryview, version: int) -> bool:
    """Make sure that the broker's answer to this ApiVersions request can be read.

    A version above the schemas' last one is set to one that no broker knows. The broker then
    answers UNSUPPORTED_VERSION (35) in the layout of version 0 with the versions that it does
    support (KIP-511), and the client asks again. Returns True when the frame was changed: the
    response then has to be read as version 0.
    """
    if is_known(API_VERSIONS, version):
        return False
    pack_into(">h", frame, _API_VERSION_OFFSET, _UNSUPPORTED_VERSION)
    return True
