"""Be the leader of a round: from what all machines said make what each of them gets."""

from collections.abc import Mapping

from structlog import get_logger

from proxy.tier.slot_balance import Placement

from .assignment import Assignment
from .assignor import assign
from .subscription import Subscription
from .user_data import FormError

LARGE_GROUP_BYTES = 512 * 2**10
"""The coordinator keeps what all machines said and got in one record, of 1 MiB at most by default
(message.max.bytes)."""

_log = get_logger(__name__)


def lead(
    said: Mapping[str, bytes], newest: Assignment | None, generation: int, place: Placement
) -> tuple[dict[str, bytes], bool]:
    """Return what each machine gets, by member id, and whether another round is wanted."""
    decided = assign({key: _decoded(data) for key, data in said.items()}, newest, generation, place)
    data = decided.assignment.encode()
    size_bytes = group_bytes(said, data)
    if size_bytes > LARGE_GROUP_BYTES:
        _log.warning(
            "the tier is near to what its group can hold",
            bytes=size_bytes,
            machines=len(said),
            members=len(decided.assignment.slot_map.members),
            fix="run fewer workers or machines, or raise message.max.bytes of the brokers",
        )
    return dict.fromkeys(said, data), decided.is_another_round_wanted


def group_bytes(said: Mapping[str, bytes], assignment: bytes) -> int:
    """Return how much the coordinator has to keep of a group, without some bytes for names."""
    return sum(map(len, said.values())) + len(said) * len(assignment)


def _decoded(data: bytes) -> Subscription | FormError:
    try:
        return Subscription.decode(data)
    except FormError as error:
        return error
