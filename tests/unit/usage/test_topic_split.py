"""A client's bytes by topic: the parts add up, and a sample is close to what it stands for."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parts.usage_world import UsageWorld

from proxy.progress.topics import TopicNames
from proxy.quota.shares import apportion_by_weight
from proxy.relay import clients as clients_module
from proxy.relay.clients import MAX_SAMPLED_TOPICS, RequestSampler, TopicByteTally
from proxy.usage.usage_meter import TopicShares

COUNTS = st.integers(0, 10**15)
ORDERS_ID = bytes(range(16))


@given(COUNTS, st.dictionaries(st.integers(), COUNTS, min_size=1).filter(lambda w: any(w.values())))
def test_parts_add_up_and_are_the_nearest(count, weights):
    parts = apportion_by_weight(count, weights)
    assert sum(parts.values()) == count
    for part, size in parts.items():
        assert abs(size * sum(weights.values()) - count * weights[part]) < sum(weights.values())


walks = st.lists(
    st.tuples(
        st.dictionaries(st.sampled_from("abc"), st.integers(0, 10**6)),
        st.integers(0, 100),
        st.sampled_from([1, 1, 7]),
    ),
    max_size=5,
)


@given(st.lists(st.tuples(st.integers(0, 10**7), walks), min_size=1, max_size=8))
def test_whatever_was_walked_the_parts_are_the_bytes(intervals):
    sampler, shares = TopicByteTally(TopicNames(), 50), TopicShares()
    for count, walked in intervals:
        for sizes, head, weight in walked:
            sampler.add_all(sizes, weight)
            sampler.walked(sum(sizes.values()) + head, weight)
        shares.take(sampler)
        parts, _ = shares.divide(count)
        assert sum(parts.values()) == count
        assert min(parts.values()) >= 0


def test_what_waits_to_be_shown_is_walked_before_the_records_are_made():
    def show():
        world.walk({"orders": 900}, 1000)
        yield

    world = UsageWorld(showing=show)
    world.connect()
    world.move(1000)
    records = world.make_records()
    assert {each.topic: each.bytes for each in records} == {"orders": 900, None: 100}
    assert not any(each.sampled for each in records)


def test_what_was_all_walked_is_exact_also_when_a_head_is_counted_in_the_interval_before():
    sampler, shares = TopicByteTally(TopicNames(), 50), TopicShares()
    assert shares.divide(110) == ({None: 110}, False)
    for sizes, count in (({"a": 100}, 60), ({}, 60), ({"b": 30}, 40)):
        if sizes:
            sampler.add_all(sizes, 1)
            sampler.walked(sum(sizes.values()) + 10, 1)
        shares.take(sampler)
        parts, sampled = shares.divide(count)
        assert not sampled
        assert sum(parts.values()) == count
    assert parts == {None: 10, "b": 30}


def test_an_interval_without_a_sample_is_as_the_one_before():
    world = UsageWorld()
    world.connect()
    world.move(1000)
    world.walk({"a": 300, "b": 100}, 500, weight=2)
    assert {r.topic: r.bytes for r in world.make_records()} == {"a": 600, "b": 200, None: 200}
    world.move(100)
    assert {r.topic: (r.bytes, r.sampled) for r in world.make_records()} == {
        "a": (60, True),
        "b": (20, True),
        None: (20, True),
    }


def test_topics_by_id_count_when_their_names_are_known():
    names = TopicNames()
    sampler = TopicByteTally(names, 50)
    sampler.add(ORDERS_ID, 100, 3)
    assert not sampler.sizes
    names.resolved({ORDERS_ID: "orders"})
    assert sampler.sizes == {"orders": 300}


def test_there_are_no_more_topics_than_fit():
    sampler = TopicByteTally(TopicNames(), 50)
    for number in range(2 * MAX_SAMPLED_TOPICS):
        sampler.add(f"t{number}", 1, 1)
    assert len(sampler.sizes) == MAX_SAMPLED_TOPICS


class Lane:
    until_shown = 0


def split_error(seed, responses, sample_every, part, *, lane, monkeypatch):
    """Return how far a topic's part is from what passed, of all, where each response has one."""
    chance = random.Random(seed)
    monkeypatch.setattr(clients_module, "random", chance.random)
    sampler = TopicByteTally(TopicNames(), sample_every)
    turns = [RequestSampler(sampler) for _ in range(3)]
    moved = dict.fromkeys("ab", 0)
    total = 0
    for number in range(responses):
        turn = turns[number % 3]
        if lane and turn.lane is None and sampler.weight > 1:
            turn.join(Lane())
        topic = "a" if chance.random() < part else "b"
        size = chance.randrange(100, 2000)
        moved[topic] += size
        total += size + 50
        if turn.lane is not None and turn.lane.until_shown > 1:
            turn.lane.until_shown -= 1
        elif weight := turn.taken():
            sampler.add_all({topic: size}, weight)
            sampler.walked(size + 50, weight)
    shares = TopicShares()
    shares.take(sampler)
    parts, _ = shares.divide(total)
    assert sum(parts.values()) == total
    return max(abs(parts.get(each, 0) - size) / total for each, size in moved.items())


@pytest.mark.parametrize("lane", [False, True], ids=["python", "lane"])
@pytest.mark.parametrize("part", [0.5, 0.9])
@pytest.mark.parametrize("responses", [1000, 2000, 10_000])
def test_the_error_of_a_topic_is_below_five_percent(monkeypatch, responses, part, lane):
    errors = [
        split_error(seed, responses, 50, part, lane=lane, monkeypatch=monkeypatch)
        for seed in range(20)
    ]
    assert max(errors) < 0.05
    assert math.fsum(errors) / len(errors) < 0.02


def test_one_in_so_many_is_walked_in_the_end(monkeypatch):
    monkeypatch.setattr(clients_module, "random", random.Random(1).random)
    sampler = TopicByteTally(TopicNames(), 20)
    sampler.walked(0, 1_000_000)
    turn = RequestSampler(sampler)
    walked = sum(turn.taken() > 0 for _ in range(20_000))
    assert walked == pytest.approx(1000, rel=0.1)
