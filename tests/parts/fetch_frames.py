"""Fetch messages of one topic, as clients and brokers write them."""

from struct import pack
from uuid import UUID

from proxy.wire.apis import APIS, FETCH

VERSION, NAMED_VERSION = 15, 11
TOPIC, TOPIC_ID = "t", UUID(int=7)
LOG_END = 60
LEAST_LIMIT = 1000
MIN_BATCH_BYTES, BATCH_PREFIX_BYTES = 61, 12


def batch(start: int, count: int) -> bytes:
    """A record batch without records."""
    head = pack(">qiibIhi", start, MIN_BATCH_BYTES - BATCH_PREFIX_BYTES, 0, 2, 0, 0, count - 1)
    return head + bytes(MIN_BATCH_BYTES - len(head))


def fetch_frame(offsets, session, number=0, forgotten=(), version=VERSION) -> bytes:
    """A request by offsets of partitions, in a session: its id and epoch.

    How much it asks for differs from one to the next, as what the lane has limited does.
    """
    request = APIS[FETCH].request
    asked = [
        request.FetchTopic.FetchPartition(partition=index, fetch_offset=offset)
        for index, offset in offsets.items()
    ]
    named = {"topic": TOPIC, "topic_id": TOPIC_ID}
    gone = [request.ForgottenTopic(**named, partitions=[each]) for each in forgotten]
    session_id, epoch = session
    message = request[version](
        max_bytes=LEAST_LIMIT + number,
        session_id=session_id,
        session_epoch=epoch,
        topics=[request.FetchTopic(**named, partitions=asked)] if offsets else [],
        forgotten_topics_data=gone,
    )
    message.with_header(correlation_id=number, client_id="c")
    return bytes(message.encode(header=True, framed=True))


def fetch_answer(rows, session_id, version=VERSION):
    """A response with rows of partition, error and records; None: no records."""
    response = APIS[FETCH].response
    topic = response.FetchableTopicResponse
    partitions = [
        topic.PartitionData(
            partition_index=index,
            error_code=error,
            high_watermark=-1 if error else LOG_END,
            last_stable_offset=-1 if error else LOG_END,
            log_start_offset=0,
            aborted_transactions=None,
            records=records,
        )
        for index, error, records in rows
    ]
    topics = [topic(topic=TOPIC, topic_id=TOPIC_ID, partitions=partitions)] if rows else []
    return response[version](session_id=session_id, responses=topics)
