"""State in one compacted topic of the Kafka cluster itself, owned by one proxy at a time.

`link` asks brokers, `topic` makes and checks the topic, `log` reads it, `producer` writes to it in
transactions, `messages` says what stands in it, and `store` is the store made of these.
"""

from .store import KafkaStore

__all__ = ["KafkaStore"]
