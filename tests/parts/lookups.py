"""ListOffsets requests as a client makes them, and answers of a broker: of partition 0."""

from proxy.wire.apis import APIS, LIST_OFFSETS
from proxy.wire.frames import RequestHead
from proxy.wire.list_offsets import LATEST, list_offsets_response

LOOKUP_VERSION = 9


def lookup_request(
    client_id: str, topic: str = "t", timestamp: int = LATEST, number: int = 1
) -> tuple[RequestHead, memoryview]:
    """Return what an interceptor is shown of a request."""
    topic_of = APIS[LIST_OFFSETS].request.ListOffsetsTopic
    partition = topic_of.ListOffsetsPartition(
        partition_index=0, timestamp=timestamp, current_leader_epoch=0
    )
    message = APIS[LIST_OFFSETS].request(
        replica_id=-1, isolation_level=0, topics=[topic_of(name=topic, partitions=[partition])]
    )
    body = bytes(message.encode(version=LOOKUP_VERSION))
    head = RequestHead(len(body), LIST_OFFSETS, LOOKUP_VERSION, number, client_id, 0)
    return head, memoryview(body)


def lookup_answer(offset: int, topic: str = "t", number: int = 1) -> bytes:
    """Return the whole frame that answers with an offset."""
    return list_offsets_response(LOOKUP_VERSION, number, {(topic, 0): offset})
