"""Before a real broker: usage records add up to what clients moved, whatever happens to it."""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import yaml
from confluent_kafka.admin import AdminClient, NewTopic
from parts.usage_world import record
from support.machine import admin_ports, broker_ports, machine_config
from support.operating import call, quota_proxy, running
from support.proxy_process import HOST, LISTENER, ProxyProcess, config, until
from support.raw import RawClient, fetch, produce, records

from examples.devkit.broker import EmbeddedBroker
from examples.devkit.loopback import free_ports
from proxy.cluster.kafka_client import Bootstrap
from proxy.usage.usage_meter import hashed_name
from proxy.usage.usage_record import UsageRecord
from proxy.usage.usage_topic import UsageTopic, fetched_values

RECORD_BYTES, RECORDS = 1_000, 40
FETCH_BYTES = 10_000
WRITTEN = "usage_records_written_total"


@pytest.fixture
def usage(topic_names: Iterator[str]) -> dict[str, object]:
    return {"topic": f"usage-{next(topic_names)}", "interval": "1s"}


@pytest.fixture
def full(topic: Callable[..., str], fill: Callable[..., None]) -> str:
    """Return a topic with records."""
    name = topic()
    fill(name, RECORDS, RECORD_BYTES)
    return name


def read(broker: EmbeddedBroker, topic: str) -> list[UsageRecord]:
    """Return all usage records, each once."""

    async def all_of() -> list[bytes | None]:
        found: list[bytes | None] = []
        with closing(UsageTopic(Bootstrap([(HOST, broker.port)]), topic)) as reader:
            async with reader.within(30):
                assert await reader.is_there()
                positions, ends = await reader.positions_at(0)
                while left := {at: n for at, n in positions.items() if n < ends[at]}:
                    for part in await reader.fetch(left):
                        found += fetched_values(topic, part, positions)
        return found

    once = {
        (each.member, each.epoch, each.sequence): each
        for each in map(UsageRecord.model_validate_json, filter(None, asyncio.run(all_of())))
    }
    return [once[key] for key in sorted(once)]


def moved(client: RawClient, name: str, count: int) -> int:
    """Fetch and produce so often; return how many bytes went either way."""
    total = 0
    for number in range(count):
        ask = produce(7, name, records(b"x" * 100)) if number % 3 == 2 else fetch(12, name)
        request = client.encode(ask)
        client.sock.sendall(request)
        client.forget()
        total += len(request) + 4 + len(client.receive_frame())
    return total


def counted(process: ProxyProcess) -> Counter[tuple[str, str]]:
    """Return bytes_total by client id and direction."""
    found: Counter[tuple[str, str]] = Counter()
    for sample in process.metrics().samples:
        if sample.name == "kafka_quota_proxy_bytes_total":
            direction = "write" if sample.labels["api"] == "Produce" else "read"
            found[sample.labels["client_id"], direction] += round(sample.value)
    return found


def summed(found: list[UsageRecord]) -> Counter[tuple[str, str]]:
    total: Counter[tuple[str, str]] = Counter()
    for each in found:
        total[each.client_id, each.direction] += each.bytes
    return total


def epochs(found: list[UsageRecord]) -> list[list[UsageRecord]]:
    by_epoch: defaultdict[int, list[UsageRecord]] = defaultdict(list)
    for each in found:
        by_epoch[each.epoch].append(each)
    return [by_epoch[epoch] for epoch in sorted(by_epoch)]


def until_written(process: ProxyProcess, more: int = 1) -> None:
    before = process.metrics().value(WRITTEN)
    until(lambda: process.metrics().value(WRITTEN) >= before + more, "usage is written")


def test_records_are_the_bytes_through_an_end_and_a_crash(
    kafka: EmbeddedBroker,
    tmp_path: Path,
    full: str,
    usage: dict[str, object],
) -> None:
    document = {**config(kafka.bootstrap), "usage": usage}
    with running(ProxyProcess(document, tmp_path)) as process:
        with RawClient(process.bootstrap, "etl") as client:
            in_order = moved(client, full, 30)
            until(lambda: sum(counted(process).values()) == in_order, "all is counted")
            assert counted(process)["etl", "write"] > 1000
            first = counted(process)
        process.stop()  # within an interval
        process.start()
        with RawClient(process.bootstrap, "etl") as client:
            until(lambda: moved(client, full, 3) and process.metrics().value(WRITTEN), "written")
            time.sleep(2)  # what passed is in an interval that is over
            until_written(process, 0)
            before_crash = counted(process)
            moved(client, full, 30)
            at_crash = counted(process)
            process.kill()
    one, two = epochs(read(kafka, str(usage["topic"])))
    assert summed(one) == first
    assert [each.sequence for each in one] == list(range(len(one)))
    assert {each.topic for each in one} == {full, None}
    assert sum(each.connections for each in one) == 1
    assert sum(each.requests for each in one) == 30
    lost = at_crash - summed(two)
    assert summed(two) <= at_crash
    assert lost <= at_crash - before_crash  # no more than what the last interval had


def test_topics_of_a_followed_query_are_exact(
    kafka: EmbeddedBroker,
    tmp_path: Path,
    topic: Callable[..., str],
    usage: dict[str, object],
) -> None:
    """Also where the lane has sent them on, and one stands for many."""
    document = {
        **config(kafka.bootstrap),
        "queries": [{"name": "etl"}],
        "usage": {**usage, "interval": "1h"},
    }
    sizes: Counter[str] = Counter()
    with running(ProxyProcess(document, tmp_path)) as process:
        with RawClient(process.bootstrap, "etl") as client:
            for name in (topic(), topic()):
                for number in range(RECORDS):
                    client.ask(produce(7, name, records(b"x" * 50 * number)))
                for offset in range(RECORDS):  # a batch at a time
                    response = client.ask(fetch(12, name, offset=offset, max_bytes=1))
                    sizes[name] += len(response.responses[0].partitions[0].records)
        process.stop()
    found = [each for each in read(kafka, str(usage["topic"])) if each.direction == "read"]
    assert {each.topic: each.bytes for each in found if each.topic is not None} == sizes
    assert sum(each.requests for each in found) == 2 * RECORDS
    assert not any(each.sampled for each in found)


def test_a_hot_restart_loses_nothing(
    kafka: EmbeddedBroker,
    tmp_path: Path,
    full: str,
    usage: dict[str, object],
) -> None:
    bind_port, first, last, admin_port = free_ports(4)
    listener = {**LISTENER, "bind": f"{HOST}:{bind_port}", "broker_ports": f"{first}-{last}"}
    document = {
        **config(kafka.bootstrap, listeners=[listener]),
        "admin": {"bind": f"{HOST}:{admin_port}"},
        "usage": {**usage, "interval": "1h"},
    }
    old = ProxyProcess(document, tmp_path / "old", anew=True).start()
    new = ProxyProcess(document, tmp_path / "new", ["--take-over", str(old.pid)], anew=True)
    try:
        with RawClient(f"{HOST}:{bind_port}", "etl") as client:
            total = moved(client, full, 20)
            new.start()
        assert old.wait() == 0
        with RawClient(f"{HOST}:{bind_port}", "etl") as client:
            total += moved(client, full, 20)
        new.stop()
    finally:
        old.kill()
        new.kill()
    found = read(kafka, str(usage["topic"]))
    assert len(epochs(found)) == 2
    assert sum(summed(found).values()) == total


@pytest.mark.slow
def test_what_a_broker_does_not_take_is_kept_and_nobody_waits_for_it(
    tmp_path: Path, fill: Callable[..., None], usage: dict[str, object]
) -> None:
    with EmbeddedBroker(tmp_path / "kafka") as broker:
        with AdminClient({"bootstrap.servers": broker.bootstrap}) as admin:
            admin.create_topics([NewTopic("orders", 1, 1)])["orders"].result(30)
        fill("orders", RECORDS, RECORD_BYTES, bootstrap=broker.bootstrap)
        document = {**config(broker.bootstrap), "usage": usage}
        with running(ProxyProcess(document, tmp_path / "proxy")) as process:
            with RawClient(process.bootstrap, "etl") as client:
                moved(client, "orders", 9)
                until_written(process)
                moved(client, "orders", 9)
                broker.kill()
            until(lambda: process.metrics().value("usage_write_errors_total") > 0, "it is tried")
            at_end = counted(process)
            (line,) = process.logged("usage is not written, trying again; relaying goes on")
            assert line["fix"]
            broker.start()
            until(lambda: process.log("usage is written again"), "it is written again", 60)
            with RawClient(process.bootstrap, "later") as client:
                moved(client, "orders", 3)
            until(lambda: counted(process)["later", "read"] > 0, "it is counted")
            at_end = counted(process)
            process.stop()
        found = read(broker, str(usage["topic"]))
        assert summed(found) == at_end
        assert [each.sequence for each in found] == list(range(len(found)))


def test_a_topic_that_would_lose_records_is_said_once_and_clients_are_served(
    kafka: EmbeddedBroker,
    tmp_path: Path,
    topic: Callable[..., str],
    fill: Callable[..., None],
) -> None:
    name, wrong = topic(), topic(config={"cleanup.policy": "compact"})
    fill(name, RECORDS, RECORD_BYTES)
    document = {**config(kafka.bootstrap), "usage": {"topic": wrong, "interval": "1s"}}
    with running(ProxyProcess(document, tmp_path)) as process:
        with RawClient(process.bootstrap, "etl") as client:
            assert moved(client, name, 9)
            until(lambda: process.metrics().value("usage_write_errors_total") > 0, "it is tried")
            assert moved(client, name, 9)
        (line,) = process.logged("usage is not written, trying again; relaying goes on")
        assert "cleanup.policy=delete" in line["fix"]
        process.terminate()
        assert process.wait() == 0
        assert process.log("the last usage records are lost")


@pytest.mark.slow
def test_members_write_what_passed_through_each(
    kafka: EmbeddedBroker,
    tmp_path: Path,
    full: str,
    usage: dict[str, object],
) -> None:
    document = machine_config(kafka.bootstrap, 2)
    document |= {"usage": usage, "admin": admin_ports(2)}
    with running(ProxyProcess(document, tmp_path)) as process:
        addresses = broker_ports(process, 2)
        for number in range(8):
            with RawClient(addresses[number % 2], f"c{number}") as client:
                moved(client, full, 6)
        until(lambda: len(counted(process)) == 16, "all is counted")
        at_end = counted(process)
        process.stop()
    found = read(kafka, str(usage["topic"]))
    assert summed(found) == at_end
    members = {each.member for each in found}
    assert len(members) == 2
    for member in members:
        own = [each.sequence for each in found if each.member == member]
        assert own == list(range(len(own)))


@pytest.mark.slow
def test_the_topics_of_a_client_are_right_within_five_percent(
    kafka: EmbeddedBroker,
    tmp_path: Path,
    topic: Callable[..., str],
    fill: Callable[..., None],
    usage: dict[str, object],
) -> None:
    small, large = topic(), topic()
    fill(small, 10, 500)
    fill(large, 10, 1_500)
    document = {**config(kafka.bootstrap), "usage": {**usage, "sample_every": 20}}
    passed: Counter[str] = Counter()
    with running(ProxyProcess(document, tmp_path)) as process:
        with RawClient(process.bootstrap, "etl") as client:
            for number in range(4_000):
                name = large if number % 4 == 0 else small
                answer = client.ask(fetch(12, name))
                passed[name] += len(answer.responses[0].partitions[0].records)
        until(lambda: sum(counted(process).values()) > sum(passed.values()), "all is counted")
        at_end = counted(process)
        process.stop()
    found = read(kafka, str(usage["topic"]))
    assert summed(found) == at_end
    assert any(each.sampled for each in found)
    by_topic: Counter[str | None] = Counter()
    for each in found:
        by_topic[each.topic] += each.bytes
    for name, size in passed.items():
        assert abs(by_topic[name] - size) < 0.05 * sum(at_end.values())


@pytest.mark.slow
def test_rules_are_suggested_from_what_was_written(
    kafka: EmbeddedBroker,
    tmp_path: Path,
    full: str,
    usage: dict[str, object],
) -> None:
    executor = "consumer-spark-kafka-source-92017897-daab-4d28-a2d5-5cc4133bee8f-1-executor-{}"
    document = {**config(kafka.bootstrap), "usage": usage}

    def suggested(process: ProxyProcess) -> list[dict[str, object]]:
        code, out, _ = quota_proxy("suggest", "--since", "1h", "--url", process.admin_url)
        assert code == 0
        found: list[dict[str, object]] = yaml.safe_load(out)["quotas"]["rules"]
        return found

    with running(ProxyProcess(document, tmp_path / "one")) as process:

        def rules() -> list[dict[str, object]]:
            for client_id in ("etl", executor.format(1), executor.format(2)):
                with RawClient(process.bootstrap, client_id) as client:
                    client.ask(fetch(12, full))
            return suggested(process)

        found = until(lambda: len(each := rules()) == 2 and each, "both are seen", 40)
        assert sorted(map(sorted, found)) == [
            ["client-id", "consumer_byte_rate"],
            ["client-id-prefix", "consumer_byte_rate", "scope"],
        ]
        process.stop()
        process.start()
        assert {each.get("client-id") for each in suggested(process)} == {None, "etl"}
        quota = call(process, "GET", "/v1/suggestions").document["clients"][0]["quotas"][0]
        assert quota["intervals"] > 0

    file = tmp_path / "with-rules.yaml"
    file.write_text(yaml.safe_dump({**document, "quotas": {"rules": found}}))
    code, out, _ = quota_proxy("check", "-c", file, "--client-id", "etl")
    assert (code, "applies to client-id=etl" in out) == (0, True)


def test_names_are_hashed_with_the_key_that_is_in_the_file_now(
    kafka: EmbeddedBroker, tmp_path: Path, full: str, usage: dict[str, object]
) -> None:
    keys = "first-key-of-some-length", "second-key-of-some-length"
    key_file = tmp_path / "usage-key"
    key_file.write_text(keys[0])
    document = {**config(kafka.bootstrap), "usage": {**usage, "hash_key_file": str(key_file)}}
    with running(ProxyProcess(document, tmp_path / "proxy")) as process:
        with RawClient(process.bootstrap, "etl") as client:
            total = moved(client, full, 6)
            until_written(process)
            key_file.write_text(keys[1])
            until(lambda: process.metrics().value("config_reloads_total") > 0, "it is loaded", 60)
            total += moved(client, full, 6)
        process.stop()
    found = read(kafka, str(usage["topic"]))
    assert {each.client_id for each in found} == {hashed_name(key.encode(), "etl") for key in keys}
    assert all(each.hashed for each in found)
    assert sum(each.bytes for each in found) == total


def test_without_usage_there_is_nothing_to_suggest_from(
    kafka: EmbeddedBroker, tmp_path: Path
) -> None:
    with running(ProxyProcess(config(kafka.bootstrap), tmp_path)) as process:
        code, out, err = quota_proxy("suggest", "--url", process.admin_url)
    assert (code, out) == (1, "")
    assert "usage: {topic: quota-proxy-usage}" in err


async def test_records_of_any_length_are_appended_in_their_order(
    kafka: EmbeddedBroker, usage: dict[str, object]
) -> None:
    topic_name = str(usage["topic"])
    rates = dict.fromkeys(range(-1000, 1001), 10**6)
    long = [record(sequence=n, rates=rates) for n in range(110)]
    with closing(UsageTopic(Bootstrap([(HOST, kafka.port)]), topic_name)) as writer:
        async with writer.within(60):
            await writer.ensure(60)
            await writer.append(long)
            await writer.append([record(sequence=110)])
    found = await asyncio.to_thread(read, kafka, topic_name)
    assert found == [*long, record(sequence=110)]


async def test_records_of_a_clock_that_was_ahead_are_written_once_it_is_put_back(
    kafka: EmbeddedBroker, usage: dict[str, object]
) -> None:
    """Brokers refuse messages of times that are more than an hour ahead."""
    topic_name, ahead_ms = str(usage["topic"]), round((time.time() + 86_400) * 1000)
    early = record(sequence=0, end_ms=ahead_ms)
    with closing(UsageTopic(Bootstrap([(HOST, kafka.port)]), topic_name)) as writer:
        async with writer.within(60):
            await writer.ensure(60)
            await writer.append([early])
    assert await asyncio.to_thread(read, kafka, topic_name) == [early]
