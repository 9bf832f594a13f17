"""Makes the topic with the right settings, or checks those of one that exists."""

from collections.abc import Mapping
from typing import Any

from kafka.protocol.admin import CreateTopicsRequest, DescribeConfigsRequest

from proxy.state.store import StateError

from .link import UNKNOWN_TOPIC, Deadline, Link, check

MAX_REPLICAS = 3

MAX_RECORD_BYTES = 8 * 2**20
"""Of key and value. A record must fit into one batch."""

BATCH_OVERHEAD_BYTES = 1024
"""More than a batch adds to its only record."""

COMPACT = "compact"
READABLE_COMPRESSION = ("producer", "uncompressed", "gzip")
"""We compress nothing, and Python reads gzip without more libraries."""

CREATE_VERSION = 4
DESCRIBE_VERSION = 1
TOPIC_RESOURCE = 2
ALREADY_EXISTS = 36


def settings(replicas: int) -> Mapping[str, str]:
    """Return what the topic is made with."""
    return {
        "cleanup.policy": COMPACT,
        # Whatever the cluster does to other topics, we must be able to read this one.
        "compression.type": "uncompressed",
        # What is acknowledged outlives the loss of a broker, and one may be away meanwhile.
        "min.insync.replicas": str(max(replicas - 1, 1)) if replicas >= MAX_REPLICAS else "1",
        "max.message.bytes": str(MAX_RECORD_BYTES + BATCH_OVERHEAD_BYTES),
        # Only closed segments are compacted. Small ones, closed soon, keep the start quick.
        "segment.bytes": str(16 * 2**20),
        "segment.ms": str(60 * 60 * 1000),
        "min.cleanable.dirty.ratio": "0.1",
        # For readers on their way only, and reading takes a minute at most.
        "delete.retention.ms": str(60 * 60 * 1000),
    }


def ensure_topic(link: Link, topic: str, deadline: Deadline) -> None:
    """Make the topic if there is none, and check that state can be kept in it.

    Raises:
        StateError: it exists and is not made for that.
        UnansweredError: no broker answers.
        RefusedError: the proxy may not make it, or not see its settings.

    """
    # At once when nobody answers; what comes later is given the time.
    if _find(link, topic, deadline) is None:
        deadline.retry(lambda: _create(link, topic, deadline))
    deadline.retry(lambda: link.leader(topic, deadline))
    found = deadline.retry(lambda: _find(link, topic, deadline))
    partitions = len(found.partitions) if found is not None else 0
    if partitions != 1:
        raise StateError(
            f"topic {topic} has {partitions} partitions, and state needs a topic of one, as only "
            "that keeps the order",
            "name another topic as state.topic; quota-proxy makes it",
        )
    configs = deadline.retry(lambda: _configs(link, topic, deadline))
    policy, compression = configs.get("cleanup.policy"), configs.get("compression.type")
    if policy != COMPACT:
        raise StateError(
            f"topic {topic} would lose state: its cleanup.policy is {policy}, not {COMPACT}",
            f"set it: kafka-configs.sh --alter --topic {topic} --add-config "
            f"cleanup.policy={COMPACT}, or name another topic as state.topic",
        )
    if compression not in READABLE_COMPRESSION:
        raise StateError(
            f"topic {topic} is compressed by the brokers: its compression.type is {compression}",
            f"set it: kafka-configs.sh --alter --topic {topic} --add-config "
            "compression.type=uncompressed, or name another topic as state.topic",
        )


def _find(link: Link, topic: str, deadline: Deadline) -> Any | None:
    (found,) = link.metadata(topic, deadline).topics
    if found.error_code == UNKNOWN_TOPIC:
        return None
    check(found.error_code, f"look for topic {topic}")
    return found


def _create(link: Link, topic: str, deadline: Deadline) -> None:
    cluster = link.metadata(topic, deadline)
    replicas = min(MAX_REPLICAS, len(cluster.brokers))
    configs = [
        CreateTopicsRequest.CreatableTopic.CreatableTopicConfig(name=name, value=value)
        for name, value in settings(replicas).items()
    ]
    wanted = CreateTopicsRequest.CreatableTopic(
        name=topic,
        num_partitions=1,
        replication_factor=replicas,
        assignments=[],
        configs=configs,
    )
    request = CreateTopicsRequest[CREATE_VERSION](
        topics=[wanted], timeout_ms=deadline.left_ms, validate_only=False
    )
    addresses = {broker.node_id: (broker.host, broker.port) for broker in cluster.brokers}
    answer = link.ask(request, deadline, addresses.get(cluster.controller_id))
    (made,) = answer.topics
    if made.error_code != ALREADY_EXISTS:  # by another proxy, or by us when the answer was lost
        check(made.error_code, f"make topic {topic}", made.error_message)


def _configs(link: Link, topic: str, deadline: Deadline) -> dict[str, str]:
    resource = DescribeConfigsRequest.DescribeConfigsResource(
        resource_type=TOPIC_RESOURCE,
        resource_name=topic,
        configuration_keys=["cleanup.policy", "compression.type"],
    )
    request = DescribeConfigsRequest[DESCRIBE_VERSION](resources=[resource], include_synonyms=False)
    (answer,) = link.ask(request, deadline).results
    check(answer.error_code, f"see the settings of topic {topic}", answer.error_message)
    return {config.name: config.value for config in answer.configs}
