"""The one Kafka client of our own; who uses it brings the messages, which are kafka-python's."""
