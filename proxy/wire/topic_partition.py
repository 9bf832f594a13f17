"""The name of a partition, as all rooms use it."""

from typing import TypeAlias

TopicPartition: TypeAlias = tuple[str, int]
"""Topic name and partition number. A plain tuple: followed messages make one for each partition."""
