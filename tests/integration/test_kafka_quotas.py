"""Quotas of the cluster itself: set with Kafka's own tool, followed by the proxy."""

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kafka.protocol.admin import DescribeClientQuotasResponse as Response
from prometheus_client import CollectorRegistry, Counter
from support.clients import Access, Librdkafka
from support.kafka_configs import alter_quotas
from support.operating import reloads, running, until_bound, write
from support.proxy_process import ProxyProcess, config, until
from support.raw import RawClient, message
from support.strangers import stranger
from support.waiting import at_work, eventually

from examples.devkit.broker import EmbeddedBroker
from proxy.cluster.kafka_client import Bootstrap, KafkaClient
from proxy.quota.entities import DEFAULT, QuotaKind
from proxy.quota.rules import Rule
from proxy.relay.kafka_quotas import PLACE, KafkaQuotaPoller, rules_of
from proxy.wire.apis import METADATA

NOTICED_WITHIN_S = 10
"""Between the change in Kafka and the proxy keeping to it."""

IMPATIENT_S = 0.2
"""For who never answers."""

PLENTY_BYTES = 10**9
LARGEST_RESPONSE_BYTES = 1 << 20

BURST_S = 1.1
"""What the proxy's sensor, which looks back on 11 samples of 100 ms, lets pass at first."""

LOWEST_SHARE = 0.6
"""A client that waits for both in full gets half of what one of them gives it."""

FROM_KAFKA = {"source": "kafka"}
SOON = {"proxy.relay.kafka_quotas.POLL_INTERVAL_S": 1.0}
"""Where it is not the point how soon a change is noticed."""
ETL = ("--entity-type", "clients", "--entity-name", "etl")
TOPIC = "records"


def entry(values: dict[str, float], **names: str | None) -> Response.EntryData:
    data = Response.EntryData
    return data(
        entity=[
            data.EntityData(entity_type=kind.replace("_", "-"), entity_name=name)
            for kind, name in names.items()
        ],
        values=[data.ValueData(key=key, value=value) for key, value in values.items()],
    )


READ = {"consumer_byte_rate": 1000.0}
ALL = {"consumer_byte_rate": 1.0, "producer_byte_rate": 2.0, "request_percentage": 3.5}


@pytest.mark.parametrize(
    ("given", "keys"),
    [
        (entry(READ, user="a"), {"user": "a"}),
        (entry(READ, user=None), {"user": DEFAULT}),
        (entry(READ, client_id="c"), {"client-id": "c"}),
        (entry(READ, client_id=None), {"client-id": DEFAULT}),
        (entry(READ, user="a", client_id="c"), {"user": "a", "client-id": "c"}),
        (entry(READ, client_id=None, user="a"), {"user": "a", "client-id": DEFAULT}),
        (entry(READ, user=None, client_id="c"), {"user": DEFAULT, "client-id": "c"}),
        (entry(READ, user=None, client_id=None), {"user": DEFAULT, "client-id": DEFAULT}),
        (entry(READ, ip="10.0.0.1"), None),
        (entry(READ, user="a", tenant="t"), None),
        (entry(READ), None),
        (entry(READ, user=""), None),
        (entry(READ, client_id=DEFAULT), None),
        (entry({}, user="a"), None),
        (entry({"controller_mutation_rate": 5.0}, user="a"), None),
        (entry({"consumer_byte_rate": 0.0}, user="a"), None),
        (entry({"consumer_byte_rate": float("nan")}, user="a"), None),
    ],
)
def test_which_entities_make_rules(given: Response.EntryData, keys: dict[str, str] | None) -> None:
    rules = rules_of([given])
    assert [rule.keys for rule in rules] == ([] if keys is None else [keys])


def test_all_quotas_of_an_entity_make_one_rule() -> None:
    (rule,) = rules_of([entry({**ALL, "controller_mutation_rate": 9.0}, user="a")])
    assert dict(rule.bounds) == {QuotaKind(kind): bound for kind, bound in ALL.items()}
    assert (rule.scope, rule.place) == ("each", PLACE)


def test_the_order_of_the_answer_does_not_matter() -> None:
    entries = [entry(READ, user=name) for name in "cab"]
    assert rules_of(entries) == rules_of(reversed(entries))


def answer(error_code: int = 0, error_message: str | None = None) -> bytes:
    """The frame of a response whose correlation id is 0."""
    response = Response(
        version=0,
        error_code=error_code,
        error_message=error_message,
        entries=[entry(READ, user="a")],
    )
    body = struct.pack(">i", 0) + response.encode()
    return struct.pack(">i", len(body)) + body


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (answer(), None),
        (answer(error_code=31, error_message="not for you"), "quotas_refused"),
        (struct.pack(">ii", 9, 0) + b"?" * 5, "bad_response"),
        (struct.pack(">i", -1), "bad_response"),
        (struct.pack(">i", 2**31 - 1), "bad_response"),
        (answer()[:-1], "closed"),
        (b"", "closed"),
        (None, "timeout"),
    ],
    ids=["good", "refused", "garbage", "negative", "huge", "cut off", "closed", "silent"],
)
async def test_every_kind_of_answer(frame: bytes | None, reason: str | None) -> None:
    """Whatever comes, the watch goes on; a failure leaves the rules as they are."""
    used: list[tuple[Rule, ...]] = []
    errors = Counter("errors", "Failures.", ["reason"], registry=CollectorRegistry())

    def failures() -> dict[str, float]:
        samples = [each for family in errors.collect() for each in family.samples]
        return {each.labels["reason"]: each.value for each in samples if each.name[-6:] == "_total"}

    async def use(rules: tuple[Rule, ...]) -> None:
        used.append(rules)

    async with stranger(frame) as address:
        patience_s = IMPATIENT_S if frame is None else NOTICED_WITHIN_S
        client = KafkaClient(Bootstrap([address]), patience_s)
        quotas = KafkaQuotaPoller(client, use, errors)
        await quotas.follow(True)
        async with at_work(quotas.watch()):
            await eventually(lambda: used or failures(), "an answer", NOTICED_WITHIN_S)
    taken = [[rule.keys for rule in rules] for rules in used]
    if reason is None:
        assert (taken, failures()) == ([[{"user": "a"}]], {})
    else:
        assert (taken, failures()) == ([], {reason: 1})


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    """A broker whose quotas may be changed, with one small record in TOPIC."""
    folder = tmp_path_factory.mktemp("quotas")
    with EmbeddedBroker(folder, properties={"quota.window.num": "2"}) as own:
        Librdkafka().produce(Access(own.bootstrap), TOPIC, [(0, b"record")])
        yield own


@pytest.fixture
def etl_quotas(broker: EmbeddedBroker) -> Iterator[Callable[[str], None]]:
    """`etl_quotas(change)` changes the quotas of the client id etl, which in the end has none."""
    left: set[str] = set()

    def change(text: str) -> None:
        alter_quotas(broker.bootstrap, text, *ETL)
        keys = {part.partition("=")[0] for part in text[1:].split(",")}
        left.symmetric_difference_update(keys - left if text[0] == "+" else keys)

    yield change
    if left:
        change(f"-{','.join(left)}")


def listed(process: ProxyProcess) -> list[tuple[str, str, bool]]:
    return [
        (entry["selector"], entry["source"], entry["in_force"])
        for entry in json.loads(process.get("/v1/quotas")[1])["quotas"]
    ]


@pytest.mark.slow
def test_kafka_configs_drives_the_proxy(
    broker: EmbeddedBroker,
    etl_quotas: Callable[[str], None],
    proxy: Callable[..., ProxyProcess],
) -> None:
    """Set, changed, removed: each holds within ten seconds, on a connection that stays."""
    rules = [{"client-id": "etl", "consumer_byte_rate": PLENTY_BYTES}]
    process = proxy(bootstrap_servers=broker.bootstrap, rules=rules, quotas=FROM_KAFKA)
    with RawClient(process.bootstrap, "etl") as client:
        until_bound(process, client, TOPIC, PLENTY_BYTES, NOTICED_WITHIN_S)
        for bound in (PLENTY_BYTES + 1, PLENTY_BYTES + 2):
            etl_quotas(f"+consumer_byte_rate={bound},controller_mutation_rate=7")
            until_bound(process, client, TOPIC, bound, NOTICED_WITHIN_S)
        selector = "client-id=etl"
        assert listed(process) == [(selector, "kafka", True), (selector, "file", False)]
        etl_quotas("-consumer_byte_rate")
        until_bound(process, client, TOPIC, PLENTY_BYTES, NOTICED_WITHIN_S)
        assert listed(process) == [(selector, "file", True)]
    read = process.logged("quotas of the cluster read", 4)
    assert [line["rules"] for line in read] == [0, 1, 1, 0], "a line for each change, no more"


@pytest.mark.slow
def test_users_and_defaults_are_followed(
    broker: EmbeddedBroker, proxy: Callable[..., ProxyProcess]
) -> None:
    clients, users = ("--entity-type", "clients"), ("--entity-type", "users")
    entities = [
        (*clients, "--entity-default"),
        (*users, "--entity-name", "alice"),
        (*users, "--entity-default", *clients, "--entity-name", "app, one"),
    ]
    selectors = [
        "client-id=<default>",
        "user=alice",
        "user=<default>,client-id=app%2C%20one",
    ]
    process = proxy(bootstrap_servers=broker.bootstrap, quotas=FROM_KAFKA, constants=SOON)
    try:
        for entity in entities:
            alter_quotas(broker.bootstrap, f"+producer_byte_rate={PLENTY_BYTES}", *entity)
        wanted = {(selector, "kafka", True) for selector in selectors}
        until(lambda: set(listed(process)) == wanted, f"{wanted}", NOTICED_WITHIN_S)
    finally:
        for entity in entities:
            alter_quotas(broker.bootstrap, "-producer_byte_rate", *entity)
    until(lambda: listed(process) == [], "they are gone", NOTICED_WITHIN_S)


@pytest.mark.slow
def test_a_reload_begins_and_ends_it(
    broker: EmbeddedBroker, etl_quotas: Callable[[str], None], tmp_path: Path
) -> None:
    etl_quotas(f"+consumer_byte_rate={PLENTY_BYTES}")
    alone, followed = (
        config(broker.bootstrap, quotas={"source": source}) for source in ("file", "kafka")
    )
    process = ProxyProcess(alone, tmp_path, constants=SOON)
    with running(process), RawClient(process.bootstrap, "etl") as client:
        until_bound(process, client, TOPIC, None, NOTICED_WITHIN_S)
        write(process, followed)
        until_bound(process, client, TOPIC, PLENTY_BYTES, 2 * NOTICED_WITHIN_S)
        write(process, alone)
        until(lambda: reloads(process)["ok"] == 2, "loaded again")
        assert listed(process) == []


@pytest.mark.slow
def test_broker_and_proxy_hold_the_same_quota(
    broker: EmbeddedBroker,
    etl_quotas: Callable[[str], None],
    proxy: Callable[..., ProxyProcess],
) -> None:
    """Both measure what really flows, so the client does not wait twice: it gets what the broker
    alone would give it.
    """
    bound, record_bytes, count = 1_000_000, 10_000, 800
    client, topic = Librdkafka(), "twice-held"
    client.produce(Access(broker.bootstrap), topic, [(0, bytes(record_bytes))] * count)
    process = proxy(bootstrap_servers=broker.bootstrap, quotas=FROM_KAFKA, constants=SOON)
    etl_quotas(f"+consumer_byte_rate={bound}")
    there = [("client-id=etl", "kafka", True)]
    until(lambda: listed(process) == there, "the quota is read", NOTICED_WITHIN_S)
    alone = client.consume(Access(broker.bootstrap, "etl"), topic, count)
    both = client.consume(Access(process.bootstrap, "etl"), topic, count)
    assert both.count == alone.count == count
    assert both.value_bytes <= bound * (both.elapsed_s + BURST_S) + LARGEST_RESPONSE_BYTES
    assert both.elapsed_s * LOWEST_SHARE <= alone.elapsed_s


@pytest.mark.slow
def test_the_last_quotas_stay_while_the_cluster_is_down(
    etl_quotas: Callable[[str], None],
    broker: EmbeddedBroker,
    proxy: Callable[..., ProxyProcess],
) -> None:
    etl_quotas(f"+consumer_byte_rate={PLENTY_BYTES}")
    process = proxy(bootstrap_servers=broker.bootstrap, quotas=FROM_KAFKA, constants=SOON)
    there = [("client-id=etl", "kafka", True)]
    until(lambda: listed(process) == there, "they are read", NOTICED_WITHIN_S)
    broker.stop()
    unread = "quotas of the cluster not read, the last ones stay"
    try:
        errors = process.metrics().value("upstream_errors_total")
        until(
            lambda: process.metrics().value("upstream_errors_total") >= errors + 2,
            "two failures are counted",
        )
        (line,) = process.logged(unread)
        assert (line["reason"], line["rules"]) == ("refused", 1)
        assert listed(process) == there
    finally:
        broker.start()
    until(lambda: len(process.log("quotas of the cluster read")) == 2, "read again")
    assert len(process.log(unread)) == 1
    with RawClient(process.bootstrap, "etl") as client:
        client.ask(message(METADATA, 1, topics=None))
        until_bound(process, client, TOPIC, PLENTY_BYTES, NOTICED_WITHIN_S)


@pytest.mark.slow
def test_a_cluster_that_wants_a_login_first(
    kafka: EmbeddedBroker, proxy: Callable[..., ProxyProcess]
) -> None:
    """It lets nobody ask without one: said and counted, and the proxy serves on."""
    process = proxy(bootstrap_servers=kafka.sasl_bootstrap, quotas=FROM_KAFKA, constants=SOON)
    unread = "quotas of the cluster not read, the last ones stay"
    (line,) = until(lambda: process.log(unread), "it says so")
    assert line["reason"] == "closed"
    assert process.get("/readyz")[0] == 200
