"""The Kafka quota proxy: everything that runs between a Kafka client and the brokers."""

__version__ = "0.1.0"
