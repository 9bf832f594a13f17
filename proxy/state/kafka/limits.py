"""How large state may be, and what goes wrong with its topic, as errors for people."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from proxy.cluster.upstream import RefusedError, UpstreamError
from proxy.state.store import StateError

from .messages import Content, Place, size_of
from .slot_table import SlotTable
from .state_topic import MAX_RECORD_BYTES, FencedError, NotYetError

MAX_STATE_BYTES = 256 * 2**20
"""Of all keys and values together; they are in memory."""

MESSAGE_TOO_LARGE = 10
FORBIDDEN = frozenset({29, 30, 31, 53})
"""Authorization failed for the topic, the group, the cluster, the transactional id."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Explains what goes wrong with the topic of a state, and names the fix."""

    topic: str
    partitions: int
    rights: str
    """That are needed besides those on the topic."""
    instead: str
    """What else can be done when the state cannot be kept in this topic."""
    make_room: str

    @contextmanager
    def of(self, done: str) -> Iterator[None]:
        """Raise StateError, that the state cannot be `done`, for what the brokers say."""
        try:
            yield
        except (UpstreamError, FencedError, RefusedError) as error:
            what = f"the state in topic {self.topic} cannot be {done}: {error}"
            raise StateError(what, self._fix_of(error)) from error

    def check_changes(self, changes: Mapping[Place, Content], slots: SlotTable) -> None:
        """Raise StateError when one of these changes, or all records with them, are too large."""
        size_bytes = slots.size_bytes
        for place, content in changes.items():
            record_bytes = size_of(content)
            if record_bytes > MAX_RECORD_BYTES:
                raise StateError(
                    f"the record {place[1]!r} has {record_bytes} bytes, and topic {self.topic} "
                    f"takes {MAX_RECORD_BYTES}",
                    self.instead,
                )
            size_bytes += record_bytes - size_of(slots.at(place))
        self.check_size(size_bytes)

    def check_size(self, size_bytes: int) -> None:
        """Raise StateError when the state is larger than it may be."""
        if size_bytes > MAX_STATE_BYTES:
            raise StateError(
                f"the state in topic {self.topic} has more than {MAX_STATE_BYTES} bytes",
                self.make_room,
            )

    def _fix_of(self, error: UpstreamError | FencedError | RefusedError) -> str:
        if isinstance(error, NotYetError):
            return error.fix
        if not isinstance(error, RefusedError):
            return "check that the brokers are up, and cluster.bootstrap_servers, tls and sasl"
        if error.error_code in FORBIDDEN:
            return (
                f"let quota-proxy create, describe, read and write topic {self.topic} and "
                f"{self.rights} (kafka-acls.sh), or {self.instead}"
            )
        if error.error_code == MESSAGE_TOO_LARGE:
            return (
                f"raise max.message.bytes of topic {self.topic} to {MAX_RECORD_BYTES} and a "
                "little more"
            )
        return (
            f"see the brokers' log, or make the topic yourself: kafka-topics.sh --create --topic "
            f"{self.topic} --partitions {self.partitions} --config cleanup.policy=compact"
        )
