"""What an error code of Kafka means to the one that keeps state."""

import pytest

from proxy.state.kafka.link import FencedError, RefusedError, UnansweredError, check

NOT_COORDINATOR = 16
INVALID_PRODUCER_EPOCH = 47
TOPIC_AUTHORIZATION_FAILED = 29
UNKNOWN_SERVER_ERROR = -1
NOT_INVENTED_YET = 9999


@pytest.mark.parametrize(
    ("code", "error", "text"),
    [
        (NOT_COORDINATOR, UnansweredError, "write: NOT_COORDINATOR"),
        # Nobody knows what became of it; to write the same once more changes nothing.
        (UNKNOWN_SERVER_ERROR, UnansweredError, "write: UNKNOWN"),
        (INVALID_PRODUCER_EPOCH, FencedError, "INVALID_PRODUCER_EPOCH"),
        (TOPIC_AUTHORIZATION_FAILED, RefusedError, "write: TOPIC_AUTHORIZATION_FAILED"),
        (NOT_INVENTED_YET, RefusedError, "write"),
    ],
)
def test_error_codes(code, error, text):
    with pytest.raises(error, match=text):
        check(code, "write")


def test_no_error():
    check(0, "write")
