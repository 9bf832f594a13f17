"""Kafka's classic group protocol as we speak it: the requests, and what error codes mean.

The versions are the first with static membership (KIP-345), of Kafka 2.3; later ones add nothing
that we need.
"""

from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

from kafka import errors
from kafka.protocol.consumer import (
    HeartbeatRequest,
    JoinGroupRequest,
    LeaveGroupRequest,
    SyncGroupRequest,
)

from metrics.clock import MS_PER_SECOND
from proxy.cluster.upstream import error_name
from proxy.state import GroupFence

PROTOCOL_TYPE = "quota-proxy"
"""Of the group: consumers that come by its name are refused, and so are we in a group of theirs."""

PROTOCOL_NAME = "slots"

NO_MEMBER_ID = ""
MEMBER_ID_REQUIRED = 79
REBALANCE_IN_PROGRESS = 27
FENCED_INSTANCE_ID = 82
GROUP_MAX_SIZE_REACHED = 81


class ErrorAction(Enum):
    """What an error code asks us to do."""

    FINE = auto()
    MOVED = auto()
    """Look for the coordinator again."""
    REJOIN = auto()
    """A round has begun, or we missed one: join as who we are."""
    UNKNOWN = auto()
    """The group does not know us any more: what we owned is lost; join as a new member."""
    LATER = auto()
    """Someone has to change something first; try again, seldom."""
    NEVER = auto()
    """Another process has our place, the group is not for us, or the brokers do not take our
    settings: stop."""


_MEANINGS: Mapping[int, ErrorAction] = {
    0: ErrorAction.FINE,
    errors.CoordinatorNotAvailableError.errno: ErrorAction.MOVED,
    errors.CoordinatorLoadInProgressError.errno: ErrorAction.MOVED,
    errors.NotCoordinatorError.errno: ErrorAction.MOVED,
    errors.RequestTimedOutError.errno: ErrorAction.MOVED,
    REBALANCE_IN_PROGRESS: ErrorAction.REJOIN,
    errors.IllegalGenerationError.errno: ErrorAction.REJOIN,
    MEMBER_ID_REQUIRED: ErrorAction.REJOIN,
    errors.UnknownMemberIdError.errno: ErrorAction.UNKNOWN,
    FENCED_INSTANCE_ID: ErrorAction.NEVER,
    errors.InconsistentGroupProtocolError.errno: ErrorAction.NEVER,
    errors.InvalidGroupIdError.errno: ErrorAction.NEVER,
    errors.InvalidSessionTimeoutError.errno: ErrorAction.NEVER,
}


def action_for_error(error_code: int) -> ErrorAction:
    """Return what to do about an error code; LATER for one that we do not expect."""
    return _MEANINGS.get(error_code, ErrorAction.LATER)


def explain_refusal(error_code: int, fence: GroupFence, session_timeout_s: float) -> str:
    """Return what an error code means here, and how to mend it."""
    group = f"group {fence.group_id}"
    texts = {
        FENCED_INSTANCE_ID: (
            f"another process has joined {group} as machine {fence.instance_id}: give each machine "
            "of a tier a name of its own, or stop the other process"
        ),
        errors.InconsistentGroupProtocolError.errno: (
            f"{group} is not one of quota-proxy machines: give the tier another name"
        ),
        errors.InvalidGroupIdError.errno: (
            f"the brokers do not take {group} as a name: give the tier another name"
        ),
        errors.InvalidSessionTimeoutError.errno: (
            "the brokers do not allow our session timeout: let group.min.session.timeout.ms be "
            f"{session_timeout_s * MS_PER_SECOND:g} at most, and "
            "group.max.session.timeout.ms no less"
        ),
        errors.GroupAuthorizationFailedError.errno: (
            f"the cluster does not let the proxy use {group}; it needs the right Read on it"
        ),
        GROUP_MAX_SIZE_REACHED: (
            f"{group} is full: raise the brokers' group.max.size, or run fewer machines"
        ),
    }
    return texts.get(error_code, f"{group}: {error_name(error_code)}")


def join_request(fence: GroupFence, session_timeout_s: float, subscription: bytes) -> Any:
    """Return the request to take part in the next round, which waits a session's time for all."""
    timeout_ms = round(session_timeout_s * MS_PER_SECOND)
    return JoinGroupRequest[5](
        **_place_in(fence),
        session_timeout_ms=timeout_ms,
        rebalance_timeout_ms=timeout_ms,
        protocol_type=PROTOCOL_TYPE,
        protocols=[(PROTOCOL_NAME, subscription)],
    )


def sync_request(fence: GroupFence, assignments: Mapping[str, bytes]) -> Any:
    """Return the request for our assignment; `assignments` are the leader's to all."""
    return SyncGroupRequest[3](
        **_place_in(fence), generation_id=fence.generation, assignments=list(assignments.items())
    )


def heartbeat_request(fence: GroupFence) -> Any:
    """Return the request to stay a member."""
    return HeartbeatRequest[3](**_place_in(fence), generation_id=fence.generation)


def leave_request(fence: GroupFence) -> Any:
    """Return the request to give up our place at once."""
    return LeaveGroupRequest[3](
        group_id=fence.group_id, members=[(fence.member_id, fence.instance_id)]
    )


def _place_in(fence: GroupFence) -> dict[str, Any]:
    """Return our place in the group: whoever joins by our name takes it from us (KIP-345)."""
    return {
        "group_id": fence.group_id,
        "member_id": fence.member_id,
        "group_instance_id": fence.instance_id,
    }
