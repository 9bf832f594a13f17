"""The largest of many, as sorting would give them."""

from heapq import nlargest

from hypothesis import given
from hypothesis import strategies as st

from proxy.admin.pagination import PageBuilder, PageRequest


@given(st.lists(st.integers(0, 5)), st.integers(0, 8))
def test_it_gives_what_nlargest_gives(keys: list[int], limit: int):
    largest = PageBuilder[tuple[int, int]](PageRequest(limit), urgency=lambda item: item[1])
    for number, key in enumerate(keys):
        largest.add((number, key))
    assert largest.rows() == nlargest(limit, enumerate(keys), key=lambda item: item[1])
