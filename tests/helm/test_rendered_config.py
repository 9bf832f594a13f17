"""The configuration in the ConfigMap is one that the proxy takes, and the Service fits it."""

import socket
from collections.abc import Mapping
from pathlib import Path

import pytest
import trustme
from chart import EXAMPLES, Helm, Rendered, lay_out

from proxy.config import Config, ConfigError, load_config


@pytest.fixture(scope="session")
def secrets() -> Mapping[str, Mapping[str, bytes]]:
    """The Secrets that a user makes beforehand for the examples."""
    authority = trustme.CA()
    issued = authority.issue_cert("kafka.example")
    tls = {
        "ca.crt": authority.cert_pem.bytes(),
        "tls.crt": issued.cert_chain_pems[0].bytes(),
        "tls.key": issued.private_key_pem.bytes(),
    }
    return {
        "kafka-cluster": tls,
        "kafka-quota-proxy-tls": tls,
        "kafka-quota-proxy-login": {"password": b"secret"},
        "kafka-quota-proxy-token": {"admin": b"secret", "other": b""},
        "kafka-quota-proxy-spark": {"token": b"secret of spark"},
        "ops-token": {"token": b"secret of ops"},
    }


@pytest.fixture(params=EXAMPLES)
def rendered(request: pytest.FixtureRequest, helm: Helm) -> Rendered:
    return helm.template(EXAMPLES[request.param])


@pytest.fixture
def config(
    rendered: Rendered,
    secrets: Mapping[str, Mapping[str, bytes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Config:
    pod = f"{rendered.workload['metadata']['name']}-0"
    monkeypatch.setattr(socket, "gethostname", lambda: pod)
    return load_config(lay_out(rendered, secrets, tmp_path))


def test_the_service_has_exactly_the_ports_that_the_proxy_opens(
    rendered: Rendered, config: Config
) -> None:
    opened = []
    for listener in config.listeners:
        opened.append(listener.bind.port)
        if listener.broker_ports:
            opened += range(listener.broker_ports.first, listener.broker_ports.last + 1)
    services = {item["metadata"]["name"]: item["spec"] for item in rendered.of("Service")}
    kafka, admin = (services[name] for name in sorted(services, key=len))
    assert [port["port"] for port in kafka["ports"]] == opened
    assert all(port["port"] == port["targetPort"] for port in kafka["ports"])
    assert [port["port"] for port in admin["ports"]] == [config.admin.bind.port]


def test_clients_are_led_to_the_service(rendered: Rendered, config: Config) -> None:
    name = rendered.main("Service")["metadata"]["name"]
    hosts = {listener.advertised_host for listener in config.listeners}
    of_pod = f"{{machine}}.{name}-admin.data.svc"
    assert hosts <= {f"{name}.data.svc", of_pod, "kafka.example", "reports.example"}


def test_others_reach_the_admin_port_by_token_only(config: Config) -> None:
    assert not config.admin.bind.is_loopback
    assert config.admin.token_file is not None


def test_tokens_with_rights_are_where_the_configuration_looks(
    helm: Helm, secrets: Mapping[str, Mapping[str, bytes]], tmp_path: Path
) -> None:
    made = helm.template(EXAMPLES["everything"])
    admin = load_config(lay_out(made, secrets, tmp_path)).admin
    found = {each.name: (each.rights, each.token_file.read_text()) for each in admin.tokens}
    assert found == {
        "spark": (("report",), "token token-spark"),
        "team-a": (("report",), "token token-team-a"),
        "ops": (("read", "quotas"), "secret of ops"),
        "prometheus": (("read",), "token token-prometheus"),
    }
    queries = {each.name: each.queries for each in admin.tokens if each.queries is not None}
    assert queries == {"team-a": ("team-a-*", "orders")}
    (secret,) = made.of("Secret")
    assert set(secret["data"]) == {*("token", "token-spark", "token-team-a", "token-prometheus")}
    assert len(set(secret["data"].values())) == 4
    (volume,) = (v for v in made.pod["spec"]["volumes"] if v["name"] == "admin-token")
    assert volume["projected"]["defaultMode"] == 0o440


def test_a_secret_is_made_for_the_tokens_that_have_none(helm: Helm) -> None:
    existing = {"adminToken.existingSecret": '"mine"'}
    assert helm.template(sets=existing).of("Secret") == []
    (secret,) = helm.template(sets={**existing, "adminTokens.a": '{"rights": ["read"]}'}).of(
        "Secret"
    )
    assert set(secret["data"]) == {"token-a"}


def test_the_admin_service_is_asked_by_its_names(rendered: Rendered, config: Config) -> None:
    (service,) = (s for s in rendered.of("Service") if s["spec"].get("clusterIP") == "None")
    name = service["metadata"]["name"]
    pod = f"{rendered.workload['metadata']['name']}-0"
    names = {name, f"{name}.data.svc", f"{pod}.{name}.data.svc", f"{name}.data.svc.cluster.local"}
    assert names <= {config.named(host) for host in config.admin.hosts}


def test_numbers_stay_whole(helm: Helm, tmp_path: Path) -> None:
    """Helm reads numbers as floating point: a large one must not come out as 1.048576e+08."""
    rule = '[{"user": "anna", "consumer_byte_rate": 104857600, "request_percentage": 12.5}]'
    made = helm.template(sets={"config.quotas.rules": rule})
    (loaded,) = load_config(lay_out(made, {}, tmp_path)).quotas.rules
    assert (loaded.consumer_byte_rate, loaded.request_percentage) == (104857600, 12.5)


def test_rates_and_gains_stay_numbers(helm: Helm, tmp_path: Path) -> None:
    """YAML takes `1e+06` for text; a large rate and a small gain must not be written so."""
    adaptive = (
        '{"batch_interval": "2s", "max_rate": 1e12, "initial_rate": 1000000, "integral": 1e-6}'
    )
    rule = f'[{{"client-id": "a", "consumer_byte_rate": "1MB", "adaptive": {adaptive}}}]'
    made = helm.template(sets={"config.quotas.rules": rule})
    (loaded,) = load_config(lay_out(made, {}, tmp_path)).quotas.rules
    assert loaded.adaptive is not None
    assert (loaded.adaptive.max_rate, loaded.adaptive.initial_rate) == (1e12, 1e6)
    assert loaded.adaptive.integral == 1e-6


@pytest.mark.parametrize(
    ("key", "value", "restarts"),
    [
        ("config.quotas.window", '"2s"', False),
        ("config.queries", '[{"name": "orders"}]', False),
        (
            "config.pipelines",
            '[{"name": "orders", "stages": [{"name": "a", "consumes": ["A"], "band": [0, 1], '
            '"normal_rate": 1, "step": 1}]}]',
            False,
        ),
        ("config.throttle", '{"max_delay": "5s"}', False),
        ("config.limits", '{"max_client_entities": 10}', True),
    ],
)
def test_what_changes_at_run_time_restarts_no_pod(
    key: str, value: str, restarts: bool, helm: Helm
) -> None:
    before, after = helm.template(), helm.template(sets={key: value})
    assert before.config != after.config
    assert (before.pod != after.pod) is restarts


def test_a_secret_that_is_not_mounted_is_found_missing(
    helm: Helm, secrets: Mapping[str, Mapping[str, bytes]], tmp_path: Path
) -> None:
    made = helm.template(EXAMPLES["tenants-sni"])
    mounts = made.container["volumeMounts"]
    mounts[:] = [mount for mount in mounts if not mount["mountPath"].endswith("/cluster")]
    with pytest.raises(ConfigError, match=r"secrets/cluster/ca\.crt.* does not exist"):
        load_config(lay_out(made, secrets, tmp_path))
