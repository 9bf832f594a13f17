"""The largest of many, as sorting would give them."""

from heapq import nlargest

from hypothesis import given
from hypothesis import strategies as st

from proxy.admin.pages import Largest


@given(st.lists(st.integers(0, 5)), st.integers(0, 8))
def test_it_gives_what_nlargest_gives(keys: list[int], limit: int):
    largest: Largest[tuple[int, int]] = Largest(limit)
    for number, key in enumerate(keys):
        largest.add(key, (number, key))
    assert largest.descending() == nlargest(limit, enumerate(keys), key=lambda item: item[1])
