"""The Kafka quota proxy: everything that runs between a Kafka client and the brokers."""
