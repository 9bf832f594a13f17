"""No client gets past its bound, whatever it does: the attempts of `bench.evasion`, and others."""

import select
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec
from support.proxy_process import HOST, ProxyProcess, config, until
from support.raw import RawClient, api_versions, fetch, message, produce

from bench.evasion import (
    ATTEMPTS,
    BOUND,
    LOGIN,
    MODES,
    PRODUCED_BYTES,
    RATES,
    RULES,
    Attempt,
    Ground,
    Outcome,
    run_all,
)
from examples.devkit.broker import EmbeddedBroker
from proxy.wire.apis import METADATA, SASL_AUTHENTICATE, SASL_HANDSHAKE

HEARTBEAT = 12

DURATION_S = 22
"""Longer than `throttle.max_delay`, at whose end all that was held too briefly would come."""

MOST_BYTES = 100_000_000
"""Beyond what is allowed in any run: an attempt that gets so much has failed."""

MOST_TOLD_MS = 3000

SLOW_BOUND_BYTES = 20_000
"""One record of RECORD_BYTES takes longer than `throttle.max_delay`."""
RECORD_BYTES = 500_000

PRODUCE_BOUND_BYTES = 100_000
SPENT_BYTES = 400_000
"""Four seconds of it: with a sensor that looks back on one, three more are owed."""
ANNOUNCED_BYTES = 100_000_000
UNACKNOWLEDGED = 20
UNACKNOWLEDGED_BYTES = 50
"""So little that the proxy reads all of them at once."""


@pytest.fixture(scope="module")
def outcomes(
    kafka: EmbeddedBroker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Outcome]]:
    """What came of every attempt, by name; the proxies' sensors are those of the defaults."""
    user = ("alice", "alice-secret")
    parts = {"quotas": {"window": "1s"}, "limits": {"drain_timeout": "1s"}}
    configs = {
        **{
            mode: config(kafka.bootstrap, rules=RULES, throttle={"mode": mode}, **parts)
            for mode in MODES
        },
        LOGIN: config(kafka.sasl_bootstrap, rules=[{"user": user[0], **RATES}], **parts),
    }
    with ExitStack() as stack:
        proxies = {}
        for way, each in configs.items():
            process = ProxyProcess(each, tmp_path_factory.mktemp(f"evasion-{way}"))
            stack.callback(process.kill)
            proxies[way] = (HOST, process.start().port)
            stack.callback(process.stop)
        made = run_all(Ground(kafka.bootstrap, proxies, user), DURATION_S, MOST_BYTES)
        yield {outcome.attempt.name: outcome for outcome in made}


@pytest.mark.slow
@pytest.mark.parametrize("attempt", ATTEMPTS, ids=lambda attempt: attempt.name)
def test_bound_is_kept(outcomes: dict[str, Outcome], attempt: Attempt) -> None:
    outcome = outcomes[attempt.name]
    assert outcome.requests > 0
    assert outcome.is_within, (
        f"{outcome.got_bytes} bytes in {outcome.elapsed_s:.1f} s, "
        f"{outcome.times_bound:.2f} times the bound; at most {outcome.allowed_bytes:.0f}"
    )


@pytest.mark.slow
def test_muted_clients_are_not_told_to_wait_for_long(outcomes: dict[str, Outcome]) -> None:
    """Of those that are over their bound already. One that was quiet, and asks for all at once,
    may get more before the first answer is measured.
    """
    told_ms = {
        name: outcome.told_ms
        for name, outcome in outcomes.items()
        if outcome.attempt.way == "mute" and outcome.attempt.spends
    }
    assert max(told_ms.values()) > 0
    assert {name: told for name, told in told_ms.items() if told > MOST_TOLD_MS} == {}


def test_login_and_requests_in_one_write_are_charged_to_the_user(
    kafka: EmbeddedBroker,
    proxy: Callable[..., ProxyProcess],
    topic: Callable[..., str],
    fill: Callable[..., None],
) -> None:
    name = topic()
    fill(name, 1, RECORD_BYTES)
    running = proxy(bootstrap_servers=kafka.sasl_bootstrap, rules=[{"user": "bob", **RATES}])
    with RawClient(running.bootstrap, "hasty") as client:
        client.send(
            message(SASL_HANDSHAKE, 1, mechanism="PLAIN"),
            message(SASL_AUTHENTICATE, 1, auth_bytes=b"\0bob\0bob.secret"),
            *[fetch(12, name) for _ in range(3)],
        )
        logins = [client.receive() for _ in range(2)]
        answers = [client.receive() for _ in range(3)]
    assert [login.error_code for login in logins] == [0, 0]
    assert all(answer.responses for answer in answers)
    bobs = {"user": "bob", "api": "Fetch"}  # counted behind the answer
    until(lambda: running.metrics().value("bytes_total", **bobs) > 3 * RECORD_BYTES, "counted")
    metrics = running.metrics()
    charged = {
        user: metrics.value("bytes_total", user=user, api="Fetch")
        for user in metrics.labels("bytes_total", "user")
    }
    assert {user for user, count in charged.items() if count} == {"bob"}
    assert metrics.value("rate_bytes", quota_entity="user=bob", quota="consumer_byte_rate") > 0


@pytest.mark.parametrize("mode", MODES)
def test_other_requests_are_not_held(
    proxy: Callable[..., ProxyProcess],
    topic: Callable[..., str],
    fill: Callable[..., None],
    mode: str,
) -> None:
    """Metadata, heartbeats and the like are answered while the client's fetches wait."""
    name = topic(config={"max.message.bytes": str(2 * RECORD_BYTES)})
    fill(name, 1, RECORD_BYTES)
    rules = [{"client-id": "slow", "consumer_byte_rate": SLOW_BOUND_BYTES}]
    running = proxy(rules=rules, throttle={"mode": mode}, limits={"drain_timeout": "1s"})
    charged = {"quota_entity": "client-id=slow", "quota": "consumer_byte_rate"}
    with ExitStack() as stack:
        reader, again, other = (
            stack.enter_context(RawClient(running.bootstrap, "slow")) for _ in range(3)
        )
        if mode == "delay":
            reader.send(fetch(12, name))
            until(lambda: running.metrics().value("rate_bytes", **charged), "it is charged")
        else:
            assert reader.ask(fetch(12, name)).throttle_time_ms > 0
            reader.send(fetch(12, name))
        again.send(fetch(12, name))
        for _ in range(20):
            other.ask(message(METADATA, 1, topics=[]))
            heartbeat = message(HEARTBEAT, 3, group_id="x", generation_id=1, member_id="y")
            assert other.ask(heartbeat).error_code != 0
            other.ask(api_versions(3))
        answered, _, _ = select.select([reader.sock, again.sock], [], [], 0)
        assert not answered, "these are fetches, and must wait"


@pytest.mark.parametrize("mode", MODES)
def test_who_only_announces_records_holds_no_other_producer(
    proxy: Callable[..., ProxyProcess], topic: Callable[..., str], mode: str
) -> None:
    """Of the clients that share a bound, one sends the head of a request, and then nothing."""
    name = topic()
    rules = [{"client-id": "<default>", "scope": "shared", "producer_byte_rate": BOUND}]
    running = proxy(rules=rules, throttle={"mode": mode})
    with RawClient(running.bootstrap, "cheat") as cheat, RawClient(running.bootstrap, "it") as it:
        head = cheat.encode(produce(7, name, b""))
        cheat.sock.sendall(ANNOUNCED_BYTES.to_bytes(4, "big") + head[4:60])
        until(lambda: running.metrics().value("requests_total", api="Produce"), "it is read")
        for _ in range(3):
            assert it.ask(produce(7, name, bytes(PRODUCED_BYTES))).throttle_time_ms == 0
        cheat.sock.close()
    rate = running.metrics().value("rate_bytes", quota="producer_byte_rate")
    assert rate < BOUND, "not what was announced"


@pytest.mark.parametrize("is_used", [False, True], ids=["new connection", "used connection"])
@pytest.mark.parametrize("mode", MODES)
def test_unacknowledged_records_of_a_client_over_its_quota_arrive(
    kafka: EmbeddedBroker,
    proxy: Callable[..., ProxyProcess],
    topic: Callable[..., str],
    mode: str,
    is_used: bool,
) -> None:
    """It writes, and closes in order: nothing tells it that anything was not taken."""
    spent, name = topic(), topic()
    rules = [{"client-id": "hasty", "producer_byte_rate": PRODUCE_BOUND_BYTES}]
    running = proxy(rules=rules, throttle={"mode": mode})
    charged = {"quota_entity": "client-id=hasty", "quota": "producer_byte_rate"}
    values = [bytes(UNACKNOWLEDGED_BYTES) for _ in range(UNACKNOWLEDGED)]
    with RawClient(running.bootstrap, "hasty") as first:
        first.send(produce(7, spent, bytes(SPENT_BYTES)))
        until(lambda: running.metrics().value("rate_bytes", **charged), "it is over its quota")
        with RawClient(running.bootstrap, "hasty") as second:
            if is_used:
                second.ask(api_versions(3))
            second.send(*[produce(7, name, value, acks=0) for value in values], answered=False)
        with AdminClient({"bootstrap.servers": kafka.bootstrap, "log_level": 0}) as admin:
            until(lambda: log_end(admin, name) >= UNACKNOWLEDGED, "all records have arrived")
            assert log_end(admin, name) == UNACKNOWLEDGED


def log_end(admin: AdminClient, topic: str) -> int:
    partition = TopicPartition(topic, 0)
    return int(admin.list_offsets({partition: OffsetSpec.latest()})[partition].result(30).offset)
