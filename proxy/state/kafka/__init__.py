"""State in one compacted topic of the Kafka cluster itself, owned by one proxy at a time.

`state_topic` makes and checks the topic and asks its brokers, `state_reader` reads it, `producer`
writes to it in transactions, `messages` says what stands in it, and `kafka_store` is made of these.
"""

from .kafka_store import KafkaStore

__all__ = ["KafkaStore"]
