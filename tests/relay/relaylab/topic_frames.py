"""Fetches, their responses and Produce requests that name topics, made by the schemas."""

from uuid import UUID

from proxy.quota.gate import LEAST_GRANT_BYTES
from proxy.wire.apis import APIS, FETCH, PRODUCE
from relaylab import frames

BY_NAME, BY_ID, PRODUCE_VERSION = 12, 13, 9
ORDERS_ID = UUID(int=7)


def keyed(topic):
    return {"topic_id": topic} if isinstance(topic, UUID) else {"topic": topic}


def fetch(number, *topics, version=BY_NAME, epoch=-1, forgotten=(), max_bytes=LEAST_GRANT_BYTES):
    request = APIS[FETCH].request
    topic_of = request.FetchTopic
    wanted = [
        topic_of(
            **keyed(topic),
            partitions=[topic_of.FetchPartition(partition=0)],
        )
        for topic in topics
    ]
    gone = [request.ForgottenTopic(topic=each, partitions=[0]) for each in forgotten]
    message = request(
        max_wait_ms=0,
        max_bytes=max_bytes,
        session_id=5,
        session_epoch=epoch,
        topics=wanted,
        forgotten_topics_data=gone,
    )
    body = bytes(message.encode(version=version))
    return frames.request(FETCH, version, number, body)


def fetched(number, sizes, version=BY_NAME, error_code=0):
    """A response with one partition for each topic and size."""
    topic_of = APIS[FETCH].response.FetchableTopicResponse
    message = APIS[FETCH].response(
        error_code=error_code,
        session_id=5,
        responses=[
            topic_of(
                **keyed(topic),
                partitions=[
                    topic_of.PartitionData(
                        partition_index=0,
                        error_code=0,
                        high_watermark=9,
                        last_stable_offset=9,
                        log_start_offset=0,
                        aborted_transactions=[],
                        preferred_read_replica=-1,
                        records=bytes(size),
                    )
                ],
            )
            for topic, size in sizes.items()
        ],
    )
    body = bytes(message.encode(version=version))
    return frames.response(FETCH, version, number, body)


def produce(number, sizes, acks=1):
    topic_of = APIS[PRODUCE].request.TopicProduceData
    message = APIS[PRODUCE].request(
        transactional_id=None,
        acks=acks,
        timeout_ms=5,
        topic_data=[
            topic_of(
                name=topic,
                partition_data=[topic_of.PartitionProduceData(index=0, records=bytes(size))],
            )
            for topic, size in sizes.items()
        ],
    )
    body = bytes(message.encode(version=PRODUCE_VERSION))
    return frames.request(PRODUCE, PRODUCE_VERSION, number, body)
