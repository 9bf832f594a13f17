"""State in a compacted topic of the Kafka cluster itself: each of its slots has one writer."""
