"""How large state may be, and what goes wrong with its topic, as errors for people."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from proxy.cluster.upstream import RefusedError, UpstreamError
from proxy.state.store import Record, StateError

from .messages import Content
from .state_topic import MAX_RECORD_BYTES

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
        what = f"the state in topic {self.topic} cannot be {done}"
        try:
            yield
        except UpstreamError as error:
            raise StateError(
                f"{what}: {error}",
                "check that the brokers are up, and cluster.bootstrap_servers, tls and sasl",
            ) from error
        except RefusedError as error:
            raise StateError(f"{what}: {error}", self._mend(error.error_code)) from error

    def size_with(
        self,
        changes: Mapping[str, Content],
        kept: Callable[[str], Record | None],
        size_bytes: int,
        limit_bytes: int,
    ) -> int:
        """Return how many bytes a state of `size_bytes` has with these changes.

        Raises StateError: one of them, or all together, are too large.
        """
        for key, content in changes.items():
            record_bytes = size_of(content)
            if record_bytes > MAX_RECORD_BYTES:
                raise StateError(
                    f"the record {key!r} has {record_bytes} bytes, and topic {self.topic} takes "
                    f"{MAX_RECORD_BYTES}",
                    self.instead,
                )
            size_bytes += record_bytes - size_of(kept(key))
        self.check_size(size_bytes, limit_bytes)
        return size_bytes

    def check_size(self, size_bytes: int, limit_bytes: int) -> None:
        """Raise StateError when the state is larger than it may be."""
        if size_bytes > limit_bytes:
            raise StateError(
                f"the state in topic {self.topic} has more than {limit_bytes} bytes",
                self.make_room,
            )

    def _mend(self, error_code: int) -> str:
        if error_code in FORBIDDEN:
            return (
                f"let quota-proxy create, describe, read and write topic {self.topic} and "
                f"{self.rights} (kafka-acls.sh), or {self.instead}"
            )
        if error_code == MESSAGE_TOO_LARGE:
            return (
                f"raise max.message.bytes of topic {self.topic} to {MAX_RECORD_BYTES} and a "
                "little more"
            )
        return (
            f"see the brokers' log, or make the topic yourself: kafka-topics.sh --create --topic "
            f"{self.topic} --partitions {self.partitions} --config cleanup.policy=compact"
        )


def size_of(content: Content) -> int:
    """Return how many bytes a record's key and value have; 0 for anything else."""
    if not isinstance(content, Record):
        return 0
    return len(content.key.encode()) + len(content.text.encode())
