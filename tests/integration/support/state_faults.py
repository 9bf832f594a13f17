"""What goes wrong for a store of state in Kafka, and whether it writes all the same."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from kafka.protocol.producer import EndTxnRequest

from proxy.cluster import kafka_client
from proxy.cluster.kafka_client import KafkaClient
from proxy.cluster.upstream import CONNECTION_CLOSED, UpstreamError
from proxy.state import StateError, Store


@contextmanager
def commits_lost(*, on_the_way_back: bool = True) -> Iterator[None]:
    """Lose what stores ask for when they commit, or what they are answered."""
    ask = KafkaClient.ask

    async def ask_in_vain(client: KafkaClient, request: Any, broker: Any = None) -> Any:
        commit = isinstance(request, EndTxnRequest) and request.committed
        answer = None if commit and not on_the_way_back else await ask(client, request, broker)
        if commit:
            raise UpstreamError(CONNECTION_CLOSED, "lost")
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KafkaClient, "ask", ask_in_vain)
        patch.setattr(kafka_client, "ASK_AGAIN_S", 600.0)  # it is not tried again
        yield


def written(store: Store, key: str, value: int) -> bool:
    """Say whether it could be written."""
    with suppress(StateError):
        store.put(key, value)
        return True
    return False
