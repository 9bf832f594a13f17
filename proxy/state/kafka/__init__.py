"""State in one compacted topic of the Kafka cluster itself, owned by one proxy at a time.

`link` asks brokers, `topic` makes and checks the topic, `log` reads it, `producer` writes to it in
transactions, `messages` says what stands in it, and `store` is the store made of these.
"""

from .store import DEFAULT_TOPIC, KafkaStore

__all__ = ["DEFAULT_TOPIC", "KafkaStore"]
