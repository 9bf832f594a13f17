"""The Kafka protocol without sockets: bytes in, decisions out."""
