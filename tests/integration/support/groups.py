"""Consumer groups as their operators see them: Kafka's own tool, and the admin client."""

from dataclasses import dataclass

from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition
from confluent_kafka.admin import AdminClient
from kafka import KafkaAdminClient
from kafka.errors import (
    CoordinatorLoadInProgressError,
    CoordinatorNotAvailableError,
    NotCoordinatorError,
)
from support.kafka_tools import TIMEOUT_S, run_tool, tool_jars

TOOL = "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand"


@dataclass(frozen=True, slots=True)
class Position:
    """A line of `kafka-consumer-groups.sh --describe`."""

    current: int
    log_end: int
    lag: int


def describe(bootstrap: str, group: str) -> dict[tuple[str, int], Position]:
    """Run `kafka-consumer-groups.sh --describe` and read its table."""
    said = run_tool(TOOL, bootstrap, "--describe", "--group", group, jars=tool_jars())
    lines = [line.split() for line in said.splitlines() if line.strip()]
    head = next(number for number, line in enumerate(lines) if line[0] == "GROUP")
    rows = [dict(zip(lines[head], line, strict=False)) for line in lines[head + 1 :]]
    return {
        (row["TOPIC"], int(row["PARTITION"])): Position(
            *(int(row[key]) for key in ("CURRENT-OFFSET", "LOG-END-OFFSET", "LAG"))
        )
        for row in rows
    }


def offsets_of(bootstrap: str, group: str) -> dict[tuple[str, int], int]:
    """Give what a group has committed; nothing while the cluster has no place for groups yet."""
    # Not librdkafka: that crashes while the group's coordinator is not there yet.
    admin = KafkaAdminClient(bootstrap_servers=bootstrap)
    try:
        found = admin.list_group_offsets(group)[group]
    except (CoordinatorNotAvailableError, CoordinatorLoadInProgressError, NotCoordinatorError):
        return {}
    finally:
        admin.close()
    return {(each.topic, each.partition): known.offset for each, known in found.items()}


def set_offsets(bootstrap: str, group: str, offsets: dict[tuple[str, int], int]) -> None:
    """Move a group, as `kafka-consumer-groups.sh --reset-offsets` does."""
    with AdminClient({"bootstrap.servers": bootstrap}) as admin:
        parts = [TopicPartition(*partition, offset) for partition, offset in offsets.items()]
        wanted = ConsumerGroupTopicPartitions(group, parts)
        admin.alter_consumer_group_offsets([wanted])[group].result(TIMEOUT_S)
