"""The proxy logs in at a real broker, with all that it asks for itself, and with nothing else."""

import asyncio
import json
import re
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml
from confluent_kafka import TopicCollection
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from support.clients import Access, Librdkafka
from support.detour import detour
from support.groups import offsets_of
from support.kafka_configs import alter_quotas
from support.operating import hang_up, quota_proxy, running, write
from support.proxy_process import HOST, ProxyProcess, config, until
from support.raw import RawClient, message
from support.waiting import at_work, eventually

from examples.devkit.broker import EmbeddedBroker
from proxy.cluster.kafka_client import Bootstrap, KafkaClient
from proxy.cluster.login import Credentials, Login
from proxy.cluster.upstream import UpstreamError
from proxy.progress.committer import Committer
from proxy.progress.log_offset_poller import LogOffsetPoller
from proxy.relay.brokers import BrokerConnector
from proxy.state import KafkaStore, StateError
from proxy.state.store import Record
from proxy.wire.apis import METADATA

USER, CLIENT = "proxy", "bob"
PASSWORDS = {USER: "proxy.secret-7", CLIENT: "bob.secret-8"}
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
PLAIN_AND_SCRAM = ("PLAIN", "SCRAM-SHA-512")
LISTENER = "listener.name.sasl_plaintext"

CLUSTER, STATE = "kafka-cluster", "state-"
RIGHTS = [
    (ResourceType.TOPIC, "*", AclOperation.READ),
    (ResourceType.GROUP, "*", AclOperation.READ),
    (ResourceType.BROKER, CLUSTER, AclOperation.DESCRIBE_CONFIGS),
    (ResourceType.TOPIC, STATE, AclOperation.CREATE),
    (ResourceType.TOPIC, STATE, AclOperation.DESCRIBE_CONFIGS),
    (ResourceType.TOPIC, STATE, AclOperation.WRITE),
    (ResourceType.TRANSACTIONAL_ID, STATE, AclOperation.WRITE),
]
"""Kafka takes READ and WRITE for DESCRIBE too."""

SHORT_SESSION = "SCRAM-SHA-256"
SESSION_MS = 1000

START_S = 60.0
NOT_LET_IN = r'login of user "proxy" by \S+ refused: .*; correct cluster\.sasl\.username, or the'
OTHERS = r"the broker offers .*; correct cluster\.sasl\.mechanism"


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    """A broker that takes all three mechanisms, ends the sessions of one of them soon, and gives
    the proxy no more rights than docs/sasl.md names.
    """
    module = "org.apache.kafka.common.security.scram.ScramLoginModule"
    properties = {
        f"{LISTENER}.sasl.enabled.mechanisms": ",".join(MECHANISMS),
        f"{LISTENER}.scram-sha-512.sasl.jaas.config": f"{module} required;",
        f"{LISTENER}.{SHORT_SESSION.lower()}.connections.max.reauth.ms": str(SESSION_MS),
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": f"User:ANONYMOUS;User:{CLIENT}",
    }
    folder = tmp_path_factory.mktemp("login-kafka")
    with EmbeddedBroker(folder, sasl_users=PASSWORDS, properties=properties) as broker:
        with AdminClient({"bootstrap.servers": broker.bootstrap}) as admin:
            info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
            password = PASSWORDS[USER].encode()
            made = admin.alter_user_scram_credentials(
                [UserScramCredentialUpsertion(USER, info, password)]
            )
            made[USER].result(30)
            for allowed in admin.create_acls([right(*each) for each in RIGHTS]).values():
                allowed.result(30)
        yield broker


def right(kind: ResourceType, name: str, operation: AclOperation) -> AclBinding:
    is_prefix = name == STATE
    pattern = ResourcePatternType.PREFIXED if is_prefix else ResourcePatternType.LITERAL
    allow = AclPermissionType.ALLOW
    return AclBinding(kind, name, pattern, f"User:{USER}", "*", operation, allow)


@pytest.fixture(params=PLAIN_AND_SCRAM)
def login(request: pytest.FixtureRequest) -> Login:
    return by(request.param)


def by(mechanism: str, password: str = PASSWORDS[USER], username: str = USER) -> Login:
    return Login(Credentials(mechanism, username, password))


def sasl_port(kafka: EmbeddedBroker) -> tuple[str, int]:
    assert kafka.settings.sasl_port is not None
    return HOST, kafka.settings.sasl_port


def bootstrap_of(kafka: EmbeddedBroker, login: Login) -> Bootstrap:
    return Bootstrap([sasl_port(kafka)], login=login)


class Book:
    """Follows one partition, and has one offset to commit."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.end = self.start = -1
        self.offsets = {(topic, 0): 7}
        self.problem: str | None = None

    def partitions(self) -> list[tuple[str, int]]:
        return [(self.topic, 0)]

    def stale(self, _now_ms: float) -> list[tuple[str, int]]:
        return self.partitions()

    def readers_of(self, _topic: str, _partition: int) -> "list[Book]":
        return [self]

    @property
    def log(self) -> "Book":
        return self

    def record_lookup_end(self, end: int, _now_ms: float, *, client_saw_it: bool) -> None:
        assert not client_saw_it
        self.end = end

    def record_start(self, offset: int) -> None:
        self.start = offset

    def due_commits(self) -> dict[str, dict[tuple[str, int], int]]:
        return {f"{self.topic}-group": self.offsets} if self.offsets else {}

    def due_to(self, group: str) -> dict[tuple[str, int], int]:
        return self.due_commits().get(group, {})

    def group_has(self, group: str, offsets: object) -> None:
        pass

    def group_lacks(self, group: str, keys: object) -> None:
        pass

    def committed(self, _group: str, _offsets: object, _now_ms: float) -> None:
        self.offsets = {}

    def commit_failed(self, _group: str, message: str) -> None:
        self.problem = message


def id_of(kafka: EmbeddedBroker, topic: str) -> bytes:
    with AdminClient({"bootstrap.servers": kafka.bootstrap}) as admin:
        found = admin.describe_topics(TopicCollection([topic]))[topic].result(30).topic_id
    parts = found.get_most_significant_bits(), found.get_least_significant_bits()
    return b"".join(part.to_bytes(8, "big", signed=True) for part in parts)


@pytest.mark.parametrize("mechanism", MECHANISMS)
async def test_topic_names(
    kafka: EmbeddedBroker, topic: Callable[..., str], mechanism: str
) -> None:
    name = topic()
    topic_id = id_of(kafka, name)
    with closing(KafkaClient(bootstrap_of(kafka, by(mechanism)))) as client:
        assert await client.topic_names([topic_id]) == {topic_id: name}


async def test_over_tls(kafka: EmbeddedBroker, topic: Callable[..., str]) -> None:
    """What the proxy takes for SASL_SSL: TLS first, in it the login."""
    name = topic()
    topic_id = id_of(kafka, name)
    authority = trustme.CA()
    server_tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(HOST).configure_cert(server_tls)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    for mechanism in PLAIN_AND_SCRAM:
        async with detour(kafka.sasl_bootstrap, tls=server_tls) as way:
            bootstrap = Bootstrap([way.address], trusting, login=by(mechanism))
            with closing(KafkaClient(bootstrap)) as client:
                assert await client.topic_names([topic_id]) == {topic_id: name}
                assert (await client.metadata([name])).topics[0].name == name
            assert way.opened == 1


async def test_the_probe_learns_the_brokers(kafka: EmbeddedBroker, login: Login) -> None:
    brokers = BrokerConnector(bootstrap_of(kafka, login))
    async with at_work(brokers.monitor()):
        await eventually(lambda: brokers.reachable, "it is probed")
    assert brokers.addresses == {1: sasl_port(kafka)}


async def test_no_connection_of_a_client_is_logged_in(kafka: EmbeddedBroker) -> None:
    bootstrap = bootstrap_of(kafka, by("PLAIN", "wrong"))
    channel = await BrokerConnector(bootstrap).connect(None)
    channel.sock.close()
    with pytest.raises(UpstreamError, match=NOT_LET_IN):
        await bootstrap.connect()


async def test_log_ends(
    kafka: EmbeddedBroker, topic: Callable[..., str], fill: Callable[..., None], login: Login
) -> None:
    name = topic()
    fill(name, 12, 20)
    book = Book(name)
    ends = LogOffsetPoller(book, KafkaClient(bootstrap_of(kafka, login)))
    async with at_work(ends.run()):
        await eventually(lambda: (book.start, book.end) == (0, 12), "both are known")
        assert await ends.look_up([(name, 0)]) == {(name, 0): 12}


async def test_commits(
    kafka: EmbeddedBroker, topic: Callable[..., str], fill: Callable[..., None], login: Login
) -> None:
    name = topic()
    fill(name, 12, 20)
    book = Book(name)
    client = KafkaClient(bootstrap_of(kafka, login))
    committer = Committer(book, lambda: client)
    assert await committer.flush(START_S), book.problem
    assert offsets_of(kafka.bootstrap, f"{name}-group") == {(name, 0): 7}


def test_state(kafka: EmbeddedBroker, topic_names: Iterator[str], login: Login) -> None:
    name, records = f"state-{next(topic_names)}", [Record.of("test/a", 1), Record.of("test/b", 2)]
    with closing(KafkaStore(Bootstrap([sasl_port(kafka)], login=login), name)) as store:
        store.put_many(records)
    with closing(KafkaStore(Bootstrap([sasl_port(kafka)], login=login), name)) as store:
        assert store.items("test/") == records


async def test_a_session_that_the_broker_ends_is_begun_anew(kafka: EmbeddedBroker) -> None:
    """Brokers end a session that was long enough, with the next request, if it is not renewed."""
    async with detour(kafka.sasl_bootstrap) as way, asyncio.timeout(START_S):
        bootstrap = Bootstrap([way.address], login=by(SHORT_SESSION))
        with closing(KafkaClient(bootstrap)) as client:
            while way.opened < 3:
                assert (await client.metadata()).brokers
            assert client.connections == 1


def test_state_outlives_a_session(kafka: EmbeddedBroker, topic_names: Iterator[str]) -> None:
    name = f"state-{next(topic_names)}"
    with closing(KafkaStore(Bootstrap([sasl_port(kafka)], login=by(SHORT_SESSION)), name)) as store:
        end_s = time.monotonic() + 2 * SESSION_MS / 1000
        while time.monotonic() < end_s:
            store.put_many([Record.of("test/at", time.monotonic())])


REFUSED = [
    pytest.param(by("PLAIN", "wrong"), NOT_LET_IN, id="wrong password, PLAIN"),
    pytest.param(by("SCRAM-SHA-512", "wrong"), NOT_LET_IN, id="wrong password, SCRAM"),
    pytest.param(by("SCRAM-SHA-512", username="nobody"), '"nobody"', id="no such user"),
]


async def refusals_of(address: tuple[str, int], credentials: Credentials) -> list[str]:
    """Have every kind of connection refused, and give what each says."""
    with pytest.raises(UpstreamError) as unreached:
        await Bootstrap([address], login=Login(credentials)).connect()
    assert unreached.value.reason == "login_refused"
    client = KafkaClient(Bootstrap([address], login=Login(credentials)))
    with pytest.raises(UpstreamError) as unanswered:
        await client.metadata()
    with pytest.raises(StateError) as unopened:
        await asyncio.to_thread(
            KafkaStore, Bootstrap([address], login=Login(credentials)), "no-state"
        )
    return [str(error.value) for error in (unreached, unanswered, unopened)]


@pytest.mark.parametrize(("login", "message"), REFUSED)
async def test_a_refused_login_is_said(kafka: EmbeddedBroker, login: Login, message: str) -> None:
    address = sasl_port(kafka)
    for text in await refusals_of(address, login.credentials):
        assert f"{HOST}:{address[1]}: login of user" in text
        assert re.search(message, text)
        assert "Authentication failed" in text
        assert "wrong" not in text


async def test_a_port_without_logins_is_said(kafka: EmbeddedBroker) -> None:
    for text in await refusals_of((HOST, kafka.port), by("PLAIN").credentials):
        assert "this port takes no logins" in text


async def test_other_mechanisms_are_said(kafka: EmbeddedBroker) -> None:
    login = by("SCRAM-SHA-1")
    with pytest.raises(UpstreamError, match=OTHERS):
        await bootstrap_of(kafka, login).connect()


def configured(
    kafka: EmbeddedBroker,
    folder: Path,
    mechanism: str = "PLAIN",
    password: str = PASSWORDS[USER],
    **parts: Any,
) -> dict[str, Any]:
    (folder / "password").write_text(password + "\n")
    made = config(kafka.sasl_bootstrap, **parts)
    made["cluster"]["sasl"] = {
        "mechanism": mechanism,
        "username": USER,
        "password_file": str(folder / "password"),
    }
    return made


@contextmanager
def proxy_with(made: dict[str, Any], folder: Path) -> Iterator[ProxyProcess]:
    with running(ProxyProcess(made, folder)) as process:
        yield process
    log = process.log_file.read_text()
    assert not [password for password in PASSWORDS.values() if password in log]


@pytest.mark.parametrize("mechanism", PLAIN_AND_SCRAM)
def test_a_proxy_in_front_of_a_cluster_that_wants_logins(
    kafka: EmbeddedBroker,
    topic: Callable[..., str],
    fill: Callable[..., None],
    tmp_path: Path,
    mechanism: str,
) -> None:
    """Quotas come from it and state is in it; clients go on logging in for themselves."""
    alter_quotas(kafka.bootstrap, "+consumer_byte_rate=12345678", "--entity-type", "users",
                 "--entity-name", CLIENT)  # fmt: skip
    name = topic()
    fill(name, 1, 1000)
    made = configured(
        kafka,
        tmp_path,
        mechanism,
        quotas={"source": "kafka"},
        state={"kind": "kafka", "topic": f"state-of-{name}"},
    )
    with proxy_with(made, tmp_path) as process:
        until(lambda: process.get("/readyz")[0] == 200, "it is ready")
        until(lambda: "12345678" in process.get("/v1/quotas")[1], "the cluster's quota is read")
        with RawClient(process.bootstrap) as nobody:
            nobody.send(message(METADATA, 1, topics=None))
            assert nobody.is_closed_by_peer()
        client = Access(process.bootstrap, "client", user=CLIENT, password=PASSWORDS[CLIENT])
        assert Librdkafka().consume(client, name, 1).count == 1
        assert process.metrics().labels("bytes_total", "user") <= {CLIENT, ""}
        assert process.metrics().value("bytes_total", user=CLIENT, api="Fetch") > 0
        assert process.metrics().value("upstream_errors_total", reason="login_refused") == 0
        in_clear = process.log("the password of cluster.sasl goes to the brokers in the clear")
        assert len(in_clear) == (mechanism == "PLAIN")


@pytest.mark.parametrize("may_write", [True, False])
def test_usage_needs_the_rights_on_its_topic(
    kafka: EmbeddedBroker,
    topic: Callable[..., str],
    fill: Callable[..., None],
    tmp_path: Path,
    may_write: bool,
) -> None:
    """Without them that is said once, and clients are served."""
    name = topic()
    fill(name, 1, 1000)
    usage = f"{STATE if may_write else 'no-'}usage-{name}"
    made = {**configured(kafka, tmp_path), "usage": {"topic": usage, "interval": "1s"}}
    with proxy_with(made, tmp_path) as process:
        client = Access(process.bootstrap, "client", user=CLIENT, password=PASSWORDS[CLIENT])
        assert Librdkafka().consume(client, name, 1).count == 1
        metric = "usage_records_written_total" if may_write else "usage_write_errors_total"
        until(lambda: process.metrics().value(metric) > 0, metric)
        if not may_write:
            (line,) = process.logged("usage is not written, trying again; relaying goes on")
            assert line["fix"] == f"let quota-proxy create, describe, read and write topic {usage}"
        assert Librdkafka().consume(client, name, 1).count == 1


def test_a_wrong_password_is_said_and_mended_while_it_runs(
    kafka: EmbeddedBroker, tmp_path: Path
) -> None:
    made = configured(kafka, tmp_path, password="wrong-one")
    with proxy_with(made, tmp_path) as process:
        (line,) = until(lambda: process.log("cluster not reachable"), "it says so")
        assert kafka.sasl_bootstrap in line["error"]
        assert "Invalid username or password" in line["error"]
        status, text = process.get("/readyz")
        assert status == 503
        assert "does not let the proxy log in" in text
        assert line["error"] in text.replace('\\"', '"')
        assert process.metrics().value("upstream_errors_total", reason="login_refused") >= 1
        assert json.loads(process.get("/v1/status")[1])["ready"] is False
        (tmp_path / "password").write_text(PASSWORDS[USER])
        hang_up(process)
        until(lambda: process.get("/readyz")[0] == 200, "it is ready")
        (line,) = until(lambda: process.log("configuration reloaded"), "it is loaded")
        assert line["message"] == "in force"
        assert len(process.log("cluster not reachable")) == 1
        assert "wrong-one" not in process.log_file.read_text()


def test_clients_are_served_when_it_is_let_in_no_longer(
    kafka: EmbeddedBroker, tmp_path: Path, topic: Callable[..., str], fill: Callable[..., None]
) -> None:
    name = topic()
    fill(name, 1, 1000)
    with proxy_with(configured(kafka, tmp_path), tmp_path) as process:
        until(lambda: process.get("/readyz")[0] == 200, "it is ready")
        assert process.metrics().value("login_refused") == 0
        (tmp_path / "password").write_text("wrong-one")
        hang_up(process)
        until(lambda: process.metrics().value("login_refused") == 1, "it is refused")
        status, text = process.get("/readyz")
        assert (status, json.loads(text)["status"]) == (200, "ready")
        assert "does not let the proxy log in" in json.loads(text)["warning"]
        metrics = process.metrics()
        assert [metrics.value(each) for each in ("ready", "cluster_reachable")] == [1, 1]
        assert json.loads(process.get("/v1/status")[1])["cluster_answers"] is True
        client = Access(process.bootstrap, "client", user=CLIENT, password=PASSWORDS[CLIENT])
        assert Librdkafka().consume(client, name, 1).count == 1


def test_a_new_password_is_noticed(kafka: EmbeddedBroker, tmp_path: Path) -> None:
    made = configured(kafka, tmp_path, password="wrong-one")
    with proxy_with(made, tmp_path) as process:
        until(lambda: process.log("cluster not reachable"), "it is refused")
        (tmp_path / "password").write_text(PASSWORDS[USER])
        until(lambda: process.get("/readyz")[0] == 200, "it is ready")


def test_another_user_waits_for_a_restart(kafka: EmbeddedBroker, tmp_path: Path) -> None:
    """With its password: the one of another user would not fit the user in force."""
    made = configured(kafka, tmp_path, "SCRAM-SHA-512")
    with proxy_with(made, tmp_path) as process:
        until(lambda: process.get("/readyz")[0] == 200, "it is ready")
        (tmp_path / "password").write_text("of-another-user")
        made["cluster"]["sasl"]["username"] = "another-user"
        made["quotas"]["source"] = "kafka"
        write(process, made)
        (line,) = until(lambda: process.log("configuration reloaded"), "it is loaded")
        assert line["message"] == "after a restart: cluster"
        until(lambda: process.log("quotas of the cluster read"), "the login in force is used")
        assert process.metrics().value("upstream_errors_total") == 0


def test_state_that_wants_a_login_stops_a_start(kafka: EmbeddedBroker, tmp_path: Path) -> None:
    state = {"kind": "kafka", "topic": "not-made"}
    made = configured(kafka, tmp_path, password="wrong-one", state=state)
    file = tmp_path / "proxy.yaml"
    file.write_text(yaml.safe_dump(made))
    code, _, errors = quota_proxy("run", "-c", file, "--log-format", "console")
    assert code == 1
    assert f"{kafka.sasl_bootstrap}: login of user" in errors
    assert "wrong-one" not in errors


@pytest.mark.parametrize(("mechanism", "warns"), [("PLAIN", True), ("SCRAM-SHA-256", False)])
def test_check_warns_of_a_password_in_the_clear(
    kafka: EmbeddedBroker, tmp_path: Path, mechanism: str, warns: bool
) -> None:
    file = tmp_path / "proxy.yaml"
    file.write_text(yaml.safe_dump(configured(kafka, tmp_path, mechanism)))
    code, out, errors = quota_proxy("check", "-c", file)
    assert (code, errors) == (0, "")
    assert ("in the clear" in out) is warns


def test_a_password_file_that_is_not_there(kafka: EmbeddedBroker, tmp_path: Path) -> None:
    file = tmp_path / "proxy.yaml"
    file.write_text(yaml.safe_dump(configured(kafka, tmp_path)))
    (tmp_path / "password").unlink()
    for name in ("run", "check"):
        code, out, errors = quota_proxy(name, "-c", file)
        assert (code, out) == (2, "")
        assert "cluster.sasl.password_file:" in errors
        assert "fix: " in errors
