"""A Fetch response with node endpoints, sent in pieces of any size, arrives without them."""

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from relaylab import frames
from relaylab.lab import open_lab

PATHS = ["splice", "copy", "tls"]


@pytest.mark.parametrize("path", PATHS)
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    records=st.lists(
        st.one_of(st.integers(0, 200), st.integers(60_000, 70_000), st.just(150_000)),
        min_size=1,
        max_size=4,
    ),
    nodes=st.integers(0, 3),
    cuts=st.lists(st.floats(0, 1), max_size=6),
    from_end=st.lists(st.integers(1, 80), max_size=4),
)
def test_at_any_split(path, certificates, records, nodes, cuts, from_end):
    sent, seen = frames.fetch_partitions(
        1, [bytes(size) for size in records], dict.fromkeys(range(nodes), ("broker.internal", 9092))
    )
    pieces = frames.in_pieces(sent, cuts, from_end)

    async def relay() -> None:
        tls = {"client_tls": certificates, "upstream_tls": certificates} if path == "tls" else {}
        async with open_lab(splice=path != "copy", **tls) as lab:
            client, broker = await lab.pair(frames.fetch_request(1, version=17))
            asked = frames.metadata_request(2)
            await client.send(asked)
            await broker.frame()
            after = frames.metadata_response(2, {})
            sending = asyncio.create_task(broker.send(*pieces[:-1], pieces[-1] + after))
            assert await client.frame() == seen
            assert await client.frame() == after
            await sending

    asyncio.run(relay())


def test_the_frames_of_this_test_are_what_the_codec_reads():
    from proxy.wire.apis import APIS, FETCH, plan_of

    sent, seen = frames.fetch_partitions(1, [b"abc", bytes(300)], {4: ("broker.internal", 9092)})
    start = plan_of(FETCH, 17).body_offset
    message = APIS[FETCH].response.decode(sent[start:], version=17)
    assert [len(part.records) for part in message.responses[0].partitions] == [3, 300]
    assert [(n.node_id, n.host, n.port) for n in message.node_endpoints] == [
        (4, "broker.internal", 9092)
    ]
    assert b"broker.internal" not in seen
    assert len(seen) == len(sent)
