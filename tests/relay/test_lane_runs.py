"""The lane keeps the last of several Fetches that read on, and nothing else stands for another."""

from types import SimpleNamespace

import pytest
from parts.bare_lane import BareLane
from wire.test_fetch_run import (
    EACH_FORM,
    FIRST,
    OTHER,
    RECORDS_BYTES,
    SECOND,
    SESSION,
    SESSIONLESS,
    VERSION,
    answered,
    asked,
    batch,
    reading_on,
    shape_of,
)

from proxy.relay.lane import Lane
from proxy.wire.apis import APIS, FETCH
from proxy.wire.frames import parse_request_head

pytestmark = pytest.mark.skipif(Lane is None, reason="there was no compiler")


def about():
    return SimpleNamespace(run=[])


def learn(world, request, response):
    """Let requests like this one pass."""
    world.about = about()
    head = parse_request_head(memoryview(request), max_request_bytes=1 << 20)
    world.learn(world.about, request, head.header_end)
    world.about.run[:] = shape_of(request, response)


@pytest.fixture
def world():
    world = BareLane()
    learn(world, *FIRST)
    yield world
    world.close()


def passed(world, *exchanges):
    """Have them sent on; return what stands for them: the number of each, start and bytes."""
    for request, response in exchanges:
        world.ask(request)
        world.answer(response)
    unshown = world.unshown[0]
    assert unshown == sum(len(row[1]) + len(row[2]) for row in world.rows)
    return [
        (int.from_bytes(request[8:12], "big"), int.from_bytes(response[4:8], "big"), *run)
        for _, request, response, _, *run, _, _ in world.rows
    ]


def size(*exchanges):
    return sum(len(response) for _, response in exchanges)


@EACH_FORM
def test_the_last_one_stands_for_all(world, version):
    first, second, third = reading_on(version)
    learn(world, *first)
    assert passed(world, first) == [(1, 1, 10, size(first))]
    assert passed(world, second) == [(2, 2, 10, size(first, second))]
    assert passed(world, third) == [(3, 3, 10, size(first, second, third))]
    (row,) = world.rows
    assert row[1:3] == third


@EACH_FORM
def test_how_many_it_stands_for_and_their_records_are_told(world, version):
    exchanges = reading_on(version)
    learn(world, *exchanges[0])
    records_bytes = 0
    for number, exchange in enumerate(exchanges, start=1):
        passed(world, exchange)
        records_bytes += RECORDS_BYTES[number - 1]
        assert world.rows[-1][-2:] == (records_bytes, number)


def test_a_run_begins_anywhere(world):
    passed(world, SECOND)
    assert passed(world, FIRST) == [(2, 2, 15, size(SECOND)), (1, 1, 10, size(FIRST))]
    world.rows.clear()
    world.unshown[0] = 0
    assert passed(world, SECOND) == [(2, 2, 15, size(SECOND))]  # what was shown is no more changed


def test_without_a_shape_there_is_none(world):
    world.about.run.clear()
    assert [row[2:] for row in passed(world, FIRST, SECOND)] == [
        (-1, size(FIRST)),
        (-1, size(SECOND)),
    ]


def test_without_a_session_as_well(world):
    first = asked(10, **SESSIONLESS), answered(batch(10, 5), session_id=0)
    second = asked(15, number=2, **SESSIONLESS), answered(batch(15, 1), number=2, session_id=0)
    world.about.run[:] = shape_of(*first)
    assert passed(world, first, second) == [(2, 2, 10, size(first, second))]


def test_several_batches_end_where_the_last_does(world):
    first = FIRST[0], answered(batch(10, 2) + batch(12, 3, size=40))
    assert passed(world, first, SECOND) == [(2, 2, 10, size(first, SECOND))]


def test_of_those_in_flight_at_once_as_well(world):
    for request, _ in (FIRST, SECOND):
        world.ask(request)
    for _, response in (FIRST, SECOND):
        world.answer(response)
    assert passed(world) == [(2, 2, 10, size(FIRST, SECOND))]


def test_a_long_one_is_python_s_while_another_is_in_flight(world):
    """What is kept of a connection has a bound, whatever its client asks for."""
    long = asked(15, number=2, partitions=range(100))
    world.ask(long)
    world.answer(answered(batch(15, 3), number=2))
    world.ask(FIRST[0])
    world.client.sendall(long)
    with pytest.raises(AssertionError, match="not plain"):
        world.lane.requests_ready()


def test_those_of_another_kind_are_kept(world):
    """Whatever comes between: it is shown in its turn."""
    passed(world, FIRST)
    other = about()
    head = parse_request_head(memoryview(FIRST[0]), max_request_bytes=1 << 20)
    world.learn(other, FIRST[0], head.header_end)
    other.run[:] = world.about.run
    rows = passed(world, SECOND)
    assert rows == [(1, 1, 10, size(FIRST)), (2, 2, 15, size(SECOND))]


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"offset": 14}, id="offset before"),
        pytest.param({"offset": 16}, id="offset behind"),
        pytest.param({"offset": -1}, id="no offset"),
        {"topic": OTHER},
        {"partitions": [0, 1]},
        {"forgotten": [1]},
        {"session_id": SESSION + 1},
        {"session_epoch": -1},
        {"of": {"current_leader_epoch": 4}},
    ],
    ids=str,
)
def test_a_request_that_differs_is_kept(world, other):
    request = asked(**{"offset": 15, "number": 2, **other})
    passed(world, FIRST)
    rows = passed(world, (request, SECOND[1]))
    assert [row[0] for row in rows] == [1, 2]
    assert rows[1][3] == len(SECOND[1])


@pytest.mark.parametrize("answered_in", [0, SESSION + 1])
def test_a_request_that_begins_another_session_is_kept(world, answered_in):
    """A broker that was asked to gives it an id of its own, or none."""
    again = (
        asked(15, number=2, session_epoch=0),
        answered(batch(15, 3), number=2, session_id=answered_in),
    )
    passed(world, FIRST)
    assert passed(world, again) == [(1, 1, 10, size(FIRST)), (2, 2, -1, size(again))]


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"records": None}, id="no records"),
        pytest.param({"records": b""}, id="empty records"),
        pytest.param({"records": batch(15, 3)[:-1]}, id="cut"),
        pytest.param({"records": batch(15, 3) + batch(18, 1)[:-1]}, id="the second is cut"),
        pytest.param({"records": batch(15, 3)[:16] + b"\1" + batch(15, 3)[17:]}, id="old format"),
        pytest.param({"records": batch(10, 5)}, id="records from before"),
        {"topic": OTHER},
        {"partitions": [0, 1]},
        {"error_code": 70},
        {"of": {"error_code": 1}},
    ],
    ids=str,
)
@EACH_FORM
def test_so_is_what_gets_another_response(world, other, version):
    is_kept(world, version, other)


def test_so_is_what_gets_the_address_of_a_broker(world):
    endpoint = APIS[FETCH].response.NodeEndpoint(node_id=1, host="h", port=1, rack=None)
    is_kept(world, VERSION, {"node_endpoints": [endpoint]})


def is_kept(world, version, other):
    """Have a Fetch between two that read on get another response."""
    first, second, third = reading_on(version)
    learn(world, *first)
    answer = answered(**{"records": batch(15, 3), "number": 2, "version": version, **other})
    passed(world, first)
    rows = passed(world, (second[0], answer))
    assert [row[0] for row in rows] == [1, 2]
    assert rows[1][3] == len(answer)
    third_row = passed(world, third)[-1]  # nothing goes on with it
    assert third_row == (3, 3, 18, size(third))
