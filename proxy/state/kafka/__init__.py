"""State in one compacted topic of the Kafka cluster itself, owned by one proxy at a time."""
