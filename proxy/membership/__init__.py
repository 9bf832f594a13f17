"""The machines of a tier as members of one Kafka group, and which of them owns which slots."""
