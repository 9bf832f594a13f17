"""Hash a quota key to its slot, as Kafka's default partitioner hashes a key to its partition."""

from functools import lru_cache

from kafka.partitioner.default import murmur2

SLOTS = 256
"""How many slots a proxy or a tier has; each has one owner. As partitions of a topic they are few,
and enough to share evenly among some dozens of members."""

MAX_KNOWN_SLOTS = 20_000
"""Keys whose slots are remembered: a hash takes microseconds, and walks ask for thousands."""

_INT31 = 0x7FFFFFFF


@lru_cache(MAX_KNOWN_SLOTS)
def slot_of(key: str, slots: int = SLOTS) -> int:
    """Return the slot of a quota key: 0 to `slots` - 1."""
    return int(murmur2(key.encode("utf-8", "surrogatepass")) & _INT31) % slots
