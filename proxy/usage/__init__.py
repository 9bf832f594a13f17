"""Who used what: a record for each interval, client and topic, written to a Kafka topic."""
