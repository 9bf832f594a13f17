"""Share a number of records out over partitions."""

from collections.abc import Mapping
from typing import TypeVar

Key = TypeVar("Key", bound=tuple[str, int])


def apportion(total: int, lags: Mapping[Key, int]) -> dict[Key, int]:
    """Share `total` out in proportion to lag, at least 1 to each partition that has any.

    Both of Spark's own limiters do so: in proportion alone, a partition with little lag would get
    nothing for as long as another has very much. The shares add up to `total` exactly, or to 1 for
    each partition with lag if these are more than `total`. No share is above its lag: where `total`
    covers them all, each is its lag.

    Those whose part is below 1 get 1; the others share the rest by largest remainders (Hamilton's
    method); of equal remainders the first key in order gets one more. All are 0 or more.
    """
    whole = sum(lags.values())
    if total >= whole:
        return dict(lags)
    made = {key: min(lag, 1) for key, lag in lags.items()}
    lagging = sorted((lag, key) for key, lag in lags.items() if lag)
    left = max(total, len(lagging))
    small = 0
    # Each of these leaves a smaller part of the rest to those after it.
    while small < len(lagging) and left * lagging[small][0] < whole:
        left -= 1
        whole -= lagging[small][0]
        small += 1
    parts = {key: divmod(left * lag, whole) for lag, key in lagging[small:]}
    made |= {key: part for key, (part, _) in parts.items()}
    spare = left - sum(part for part, _ in parts.values())
    for key in sorted(parts, key=lambda key: (-parts[key][1], key))[:spare]:
        made[key] += 1
    return made
