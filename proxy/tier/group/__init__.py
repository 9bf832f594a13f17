"""The members of a tier in one Kafka group, and which of them owns which slots."""
