"""What an error code of Kafka means to the one that keeps state."""

import pytest

from proxy.cluster.kafka_client import Bootstrap
from proxy.cluster.upstream import NonRetriableError, UpstreamError
from proxy.state.kafka.state_topic import FencedError, StateTopic

NOT_COORDINATOR = 16
INVALID_PRODUCER_EPOCH = 47
TOPIC_AUTHORIZATION_FAILED = 29
UNKNOWN_SERVER_ERROR = -1
NOT_INVENTED_YET = 9999


@pytest.mark.parametrize(
    ("code", "error", "text"),
    [
        (NOT_COORDINATOR, UpstreamError, "write: NOT_COORDINATOR"),
        # Nobody knows what became of it; to write the same once more changes nothing.
        (UNKNOWN_SERVER_ERROR, UpstreamError, "write: UNKNOWN"),
        (INVALID_PRODUCER_EPOCH, FencedError, "INVALID_PRODUCER_EPOCH"),
        (TOPIC_AUTHORIZATION_FAILED, NonRetriableError, "write: TOPIC_AUTHORIZATION_FAILED"),
        (NOT_INVENTED_YET, NonRetriableError, "write"),
    ],
)
def test_error_codes(code, error, text):
    with pytest.raises(error, match=text):
        topic().check(code, "write")


def test_no_error():
    topic().check(0, "write")


def topic() -> StateTopic:
    return StateTopic(Bootstrap([("broker", 9092)]), "state")
