"""Hash a quota key to its slot, as Kafka's default partitioner hashes a key to its partition."""

SLOTS = 256
"""How many slots a proxy or a tier has; each has one owner. As partitions of a topic they are few,
and enough to share evenly among some dozens of members."""

_SEED, _MULTIPLIER, _SHIFT = 0x9747B28C, 0x5BD1E995, 24
_INT32, _INT31 = 0xFFFFFFFF, 0x7FFFFFFF
_WORD_BYTES = 4


def slot_of(key: str, slots: int = SLOTS) -> int:
    """Return the slot of a quota key: 0 to `slots` - 1."""
    return (murmur2(key.encode("utf-8", "surrogatepass")) & _INT31) % slots


def murmur2(data: bytes) -> int:
    """Return the 32-bit hash of Kafka's `Utils.murmur2`, as an unsigned number."""
    length = len(data)
    value = (_SEED ^ length) & _INT32
    whole = length - length % _WORD_BYTES
    for start in range(0, whole, _WORD_BYTES):
        word = int.from_bytes(data[start : start + _WORD_BYTES], "little")
        word = word * _MULTIPLIER & _INT32
        word = (word ^ word >> _SHIFT) * _MULTIPLIER & _INT32
        value = value * _MULTIPLIER & _INT32 ^ word
    if whole < length:
        value = (value ^ int.from_bytes(data[whole:], "little")) * _MULTIPLIER & _INT32
    value = (value ^ value >> 13) * _MULTIPLIER & _INT32
    return value ^ value >> 15
