"""Share a number of records out over partitions."""

from collections.abc import Mapping
from typing import TypeVar

Key = TypeVar("Key", bound=tuple[str, int])


def shares(total: int, lags: Mapping[Key, int]) -> dict[Key, int]:
    """Share `total` out in proportion to lag; the shares add up to it exactly.

    By largest remainders (Hamilton's method); of equal remainders the first key in order gets one
    more. No share is above its lag: where `total` covers them all, each is its lag.

    Args:
        total: 0 or more.
        lags: 0 or more each.

    """
    whole = sum(lags.values())
    if total >= whole:
        return dict(lags)
    parts = {key: divmod(total * lag, whole) for key, lag in lags.items()}
    made = {key: part for key, (part, _) in parts.items()}
    left = total - sum(made.values())
    for key in sorted(parts, key=lambda key: (-parts[key][1], key))[:left]:
        made[key] += 1
    return made
