"""The configuration as frozen models: which keys there are, their types and defaults.

The names of the keys are contracts with users, and examples/quota-proxy.yaml says what each means.
A model checks its values, and that they agree; what concerns several sections is in `checks`.
"""

import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Final, Literal
from urllib.parse import quote

from pydantic import Field, PrivateAttr, StrictBool, field_validator
from pydantic import ValidationInfo as Info
from pydantic.dataclasses import dataclass

from proxy.config import endpoints, files
from proxy.config.rule_models import QuotasSection
from proxy.pipeline.graph import PipelineSettings
from proxy.progress.query import STUCK_AFTER_MS, ProgressSettings, QuerySettings
from proxy.progress.report import ANY_REST
from proxy.quota import fields
from proxy.quota.fields import (
    Loc,
    SectionProblem,
    catch_bad_value,
    not_empty,
    rejecting,
    required_with_example,
)
from proxy.quota.rules import QuotaManagerSettings
from proxy.quota.values import BadValueError
from proxy.relay.services import Limits

HIDE_PASSWORD = "add cluster.tls, or use SCRAM-SHA-512 as cluster.sasl.mechanism"
"""What mends a password that goes in the clear."""

MAX_PATTERN_BYTES = 4096
"""Of the queries of one token, percent-encoded: so they go to the member that a report is for."""

STATE_KEYS: Final = {"path": "sqlite", "topic": "kafka", "on_damage": "sqlite"}
"""The kind of state that has a use for the key."""
STATE_KINDS: Final = {
    "memory": "keeps nothing",
    "sqlite": "keeps state in a file",
    "kafka": "keeps state in a topic",
}

MAX_WORKERS: Final = 256
MAX_USAGE_INTERVAL_S: Final = 3600
MAX_SAMPLE_EVERY: Final = 1000

AUTO: Final = "auto"
"""Stands for a worker for each core that this process may use."""

RESERVED_NAMES: Final = {
    "admin": "the token in admin.token_file",
    "local": "those who need no token",
    "file": "the configuration file",
}
"""How others than tokens by name are called, where changes are recorded."""

PATTERN_FIX: Final = "write names of queries, or how they begin, such as team-a-*"


def _host_name() -> str:
    """Return the first label of this machine's host name, which on Kubernetes is the pod's."""
    return socket.gethostname().partition(".")[0]


def _is_unprintable(text: str) -> bool:
    return not text.isprintable()


def _has_inner_rest(pattern: str) -> bool:
    return ANY_REST in pattern[:-1]


_OTHER_NAME = "choose another name"
_UNPRINTABLE = "{} is not printable"

UsageInterval = Annotated[
    fields.Duration,
    rejecting(
        lambda seconds: not 1 <= seconds <= MAX_USAGE_INTERVAL_S,
        "{} is out of range",
        "write 1s to 1h, such as 60s",
    ),
]
"""Seconds."""
SampleEvery = Annotated[int, fields.whole_number_validator(1, MAX_SAMPLE_EVERY)]
Workers = Annotated[int | Literal["auto"], fields.whole_number_validator(1, MAX_WORKERS, AUTO)]
TokenName = Annotated[
    fields.Text,
    *(
        rejecting(name.__eq__, f"{{}} is the name of {whose}", _OTHER_NAME)
        for name, whose in RESERVED_NAMES.items()
    ),
    rejecting(_is_unprintable, _UNPRINTABLE, _OTHER_NAME),
]
QueryPattern = Annotated[
    fields.Text,
    rejecting(_has_inner_rest, f"{{}} has a {ANY_REST} before its end", PATTERN_FIX),
    rejecting(ANY_REST.__eq__, "{} is every query", "remove queries: then it is for all"),
    rejecting(_is_unprintable, _UNPRINTABLE, PATTERN_FIX),
]
"""A query's name or client id, or a beginning of it and `*`."""


class ClusterTls(fields.ConfigSection):
    """TLS to the brokers. Without `ca_file` the system's certificate authorities are trusted."""

    ca_file: files.CertificateFile | None = None
    cert_file: files.CertificateFile | None = None
    key_file: files.KeyFile | None = None

    def find_section_problems(self) -> Iterator[SectionProblem]:  # noqa: D102
        at, cert_file, key_file = ("key_file",), self.cert_file, self.key_file
        if cert_file and key_file:
            yield from catch_bad_value(at, files.check_key_pair, cert_file, key_file)
        elif cert_file:
            yield SectionProblem(at, "is missing, and cert_file is of no use alone", "add key_file")
        elif key_file:
            fix = "add cert_file or remove key_file"
            yield SectionProblem(at, "is of no use without cert_file", fix)


class ClusterSasl(fields.ConfigSection):
    """As whom the proxy itself logs in to the brokers; clients log in for themselves."""

    mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = required_with_example(
        "mechanism: SCRAM-SHA-512"
    )
    username: fields.Text = required_with_example("username: quota-proxy")
    password_file: files.PasswordFile = required_with_example("password_file: cluster-password")


class ClusterSection(fields.ConfigSection):
    """The Kafka cluster behind the proxy."""

    bootstrap_servers: Annotated[
        tuple[endpoints.Endpoint, ...], not_empty("names no broker", "write at least one HOST:PORT")
    ] = required_with_example("bootstrap_servers: [broker-1:9092, broker-2:9092]")
    tls: ClusterTls | None = None
    sasl: ClusterSasl | None = None
    unknown_apis: Literal["hide", "pass"] = "hide"

    @property
    def shows_password(self) -> bool:
        """Whether the password goes over the network in the clear."""
        return self.sasl is not None and self.sasl.mechanism == "PLAIN" and self.tls is None


class ServerTls(fields.ConfigSection):
    """TLS to those who connect; with `ca_file` they must show a certificate that it signed."""

    cert_file: files.CertificateFile = required_with_example("cert_file: server.pem")
    key_file: files.KeyFile = required_with_example("key_file: server.key")
    ca_file: files.CertificateFile | None = None

    def find_section_problems(self) -> Iterator[SectionProblem]:  # noqa: D102
        yield from catch_bad_value(
            ("key_file",), files.check_key_pair, self.cert_file, self.key_file
        )


class ListenerTls(ServerTls):
    """TLS to the clients. With `sni` brokers are told apart by the name that a client asks for."""

    sni: endpoints.Sni | None = None


class ListenerSection(fields.ConfigSection):
    """Where clients connect, and which addresses are advertised to them.

    `broker_ports` is None only when `tls.sni` tells the brokers apart.
    """

    name: fields.Text = required_with_example("name: default")
    bind: endpoints.Bind = required_with_example("bind: 0.0.0.0:19092")
    advertised_host: endpoints.AdvertisedHost = required_with_example(
        "advertised_host: proxy.example"
    )
    tls: ListenerTls | None = None
    broker_ports: endpoints.BrokerPorts | None = Field(default=None, validate_default=True)

    @field_validator("broker_ports")
    @classmethod
    def _brokers_have_ports(
        cls, ports: endpoints.PortRange | None, info: Info
    ) -> endpoints.PortRange | None:
        if ports is None and "tls" in info.data and getattr(info.data["tls"], "sni", None) is None:
            raise BadValueError("is missing", "add it, for example: broker_ports: 19100-19199")
        return ports

    @property
    def sni(self) -> str | None:
        """The pattern of names that tell the brokers apart, if they do."""
        return self.tls.sni if self.tls is not None else None

    @property
    def names(self) -> dict[Loc, str]:
        """What clients are told to connect to, by the keys that say so."""
        names = {("advertised_host",): self.advertised_host, ("tls", "sni"): self.sni}
        return {loc: name for loc, name in names.items() if name}


class ThrottleSection(fields.ConfigSection):
    """How a client over its quota is slowed."""

    mode: Literal["delay", "mute"] = "delay"
    max_delay_ms: fields.Milliseconds = 20_000.0
    enforce: StrictBool = True

    @property
    def holds(self) -> bool:
        """Whether responses are held, and their clients not told to wait."""
        return self.mode == "delay"


class StateSection(fields.ConfigSection):
    """Where state outlives a restart."""

    kind: Literal["memory", "sqlite", "kafka"] = "sqlite"
    path: files.FilePath = Field(default=Path("quota-proxy.db"), validate_default=True)
    topic: fields.Topic = "quota-proxy-state"
    on_damage: Literal["refuse", "start_empty"] = "refuse"

    def find_section_problems(self) -> Iterator[SectionProblem]:  # noqa: D102
        for key, kind in STATE_KEYS.items():
            if key in self.model_fields_set and kind != self.kind:
                message = f"is of no use to kind {self.kind}, which {STATE_KINDS[self.kind]}"
                yield SectionProblem((key,), message, f"remove it, or write kind: {kind}")
        if self.kind == "sqlite":
            yield from catch_bad_value(("path",), files.check_database, self.path)


class TokenSection(fields.ConfigSection):
    """A bearer token and what those may do who show it; without `queries` they report of all."""

    name: TokenName = required_with_example("name: spark")
    token_file: files.TokenFile = required_with_example("token_file: spark-token")
    rights: Annotated[
        tuple[Literal["read", "report", "quotas"], ...],
        not_empty("allow nothing", "write at least one of read, report, quotas"),
    ] = required_with_example("rights: [report]")
    queries: (
        Annotated[
            tuple[QueryPattern, ...],
            not_empty("names none", f"{PATTERN_FIX}, or remove it: then all"),
        ]
        | None
    ) = None

    def find_section_problems(self) -> Iterator[SectionProblem]:  # noqa: D102
        if self.queries is not None and "report" not in self.rights:
            fix = "remove it, or add report to rights"
            yield SectionProblem(("queries",), "is of no use without the right report", fix)
        elif sum(len(quote(each, safe="")) for each in self.queries or ()) > MAX_PATTERN_BYTES:
            fix = "write beginnings of names, such as team-a-*"
            yield SectionProblem(("queries",), "is too long", fix)


class AdminSection(fields.ConfigSection):
    """The HTTP server for metrics, health and the API; others may reach it only with a token."""

    bind: endpoints.Bind = endpoints.HostPort("127.0.0.1", 9644)
    tls: ServerTls | None = None
    tokens: tuple[TokenSection, ...] = ()
    token_file: files.TokenFile | None = None
    read_needs_token: StrictBool = False
    open_paths: tuple[Literal["/healthz", "/readyz", "/metrics"], ...] = (
        "/healthz",
        "/readyz",
        "/metrics",
    )
    hosts: tuple[endpoints.AdvertisedHost, ...] = ()
    max_connections: fields.Count = 500
    max_connections_per_ip: fields.Count = 200
    head_timeout: fields.Duration = 10.0
    idle_timeout: fields.Duration = 75.0

    def find_section_problems(self) -> Iterator[SectionProblem]:  # noqa: D102
        at, readers = ("token_file",), [each for each in self.tokens if "read" in each.rights]
        if self.token_file is None and not self.tokens and not self.bind.is_loopback:
            fix = "add token_file, or bind to 127.0.0.1"
            yield SectionProblem(at, f"is missing, and others can reach {self.bind}", fix)
        token_files = [each.token_file for each in self.tokens]
        same = files.find_same_token(
            [*token_files, *([self.token_file] if self.token_file else ())]
        )
        if same is not None:
            message = f"and admin.tokens hold one token twice, in {same[0]} and {same[1]}"
            yield SectionProblem(at, message, "put a token of its own into each file")
        if self.read_needs_token and not readers and self.token_file is None:
            fix = "add token_file, or a token with the right read"
            yield SectionProblem(("read_needs_token",), "is set, and no token may read", fix)


class TierSection(fields.ConfigSection):
    """Several machines that serve one cluster as one; each holds its own part of the clients."""

    name: fields.Topic = required_with_example("name: quota-proxy")
    machine: endpoints.MachineName = Field(default_factory=_host_name, validate_default=True)
    admin_host: endpoints.AdvertisedHost | None = None


class UsageSection(fields.ConfigSection):
    """The topic to which is written who used what; with a key the names of clients are hashed."""

    topic: fields.Topic = "quota-proxy-usage"
    interval: UsageInterval = 60.0
    sample_every: SampleEvery = 50
    hash_key_file: files.HashKeyFile | None = None


@dataclass(frozen=True, kw_only=True, config=fields.ONLY_KNOWN_KEYS)
class QuerySection(QuerySettings):
    """A Structured Streaming query whose progress is followed."""

    name: fields.Text = required_with_example("name: orders")
    client_id: fields.QueryClient = Field(
        default_factory=lambda data: data["name"], validate_default=True
    )
    commit_group: fields.Text | None = Field(default=None)
    stuck_after_ms: fields.Milliseconds = Field(default=STUCK_AFTER_MS)


class ProgressSection(fields.ConfigSection):
    """How queries are followed."""

    answer_lookups: StrictBool = True


class Config(fields.ConfigSection):
    """A whole configuration; made by `load_config`, which also does the checks across sections."""

    cluster: ClusterSection = required_with_example("cluster: {bootstrap_servers: [broker-1:9092]}")
    listeners: Annotated[
        tuple[ListenerSection, ...],
        not_empty("names no listener", "write at least one, see examples/minimal.yaml"),
    ] = Field(
        examples=[
            "listeners: [{name: default, bind: 0.0.0.0:19092, "
            "advertised_host: localhost, broker_ports: 19100-19199}]"
        ]
    )
    quotas: QuotasSection = QuotasSection()
    queries: tuple[QuerySection, ...] = ()
    pipelines: tuple[PipelineSettings, ...] = ()
    progress: ProgressSection = ProgressSection()
    throttle: ThrottleSection = ThrottleSection()
    limits: Limits = Limits()
    state: StateSection = Field(default={}, validate_default=True)
    tier: TierSection | None = None
    usage: UsageSection | None = None
    admin: AdminSection = AdminSection()
    workers: Workers = 1
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    _places: Mapping[str, str] = PrivateAttr(default_factory=dict)

    @property
    def worker_count(self) -> int:
        """How many processes share the work on this machine."""
        if self.workers == AUTO:
            return min(len(os.sched_getaffinity(0)), MAX_WORKERS)
        return self.workers

    def named(self, host: str) -> str:
        """Return a host, or a pattern of hosts, with this machine's name where it is to stand."""
        machine = _host_name() if self.tier is None else self.tier.machine
        return host.replace(endpoints.MACHINE_PLACEHOLDER, machine)

    @property
    def quota_settings(self) -> QuotaManagerSettings:
        """The rules, and how their clients are measured."""
        return QuotaManagerSettings(
            rules=tuple(self.quotas.make_rules(self.place)),
            **self.quotas.model_dump(include={"window_ms", "samples", "burst_ms"}),
            **self.throttle.model_dump(include={"max_delay_ms", "enforce"}),
            max_client_entities=self.limits.max_client_entities,
        )

    @property
    def progress_settings(self) -> ProgressSettings:
        """The queries, and how many there may be."""
        return ProgressSettings(
            queries=self.queries,
            max_queries=self.limits.max_client_entities,
            answers_lookups=self.progress.answer_lookups,
        )

    def locate(self, places: Mapping[str, str]) -> None:
        """Set where its keys stand, as `place` returns it."""
        self._places = places

    def place(self, key: str) -> str:
        """Return where a key such as `quotas.rules[2]` stands, as `FILE:LINE`; "" if nowhere."""
        return self._places.get(key, "")
