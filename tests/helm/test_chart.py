"""The chart's objects: right for Kubernetes, and right for each other."""

import json
import shutil
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from chart import CHART, EXAMPLES, ChartError, Helm, Rendered

KUBERNETES_VERSIONS = ("1.27", "1.30", kubernetes_validate.latest_version())
CUSTOM = {"ServiceMonitor", "PrometheusRule"}

EVERYTHING_ON = {
    f"{part}.enabled": "true"
    for part in ("networkPolicy", "serviceMonitor", "prometheusRule", "dashboard")
}


@pytest.fixture(scope="session", params=EXAMPLES)
def rendered(request: pytest.FixtureRequest, helm: Helm) -> Rendered:
    return helm.template(EXAMPLES[request.param])


@pytest.mark.parametrize("name", [None, *EXAMPLES])
def test_lint(helm: Helm, name: str | None) -> None:
    assert "0 chart(s) failed" in helm.lint(*([EXAMPLES[name]] if name else []))


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_objects_are_what_kubernetes_takes(rendered: Rendered, version: str) -> None:
    checked = [
        kubernetes_validate.validate(item, version, strict=True)
        for item in rendered.objects
        if item["kind"] not in CUSTOM
    ]
    assert len(checked) > 5


@pytest.mark.parametrize(
    ("where", "value"),
    [("replicas", "two"), ("replica", 2)],
    ids=["wrong type", "unknown key"],
)
def test_the_validator_finds_mistakes(helm: Helm, where: str, value: Any) -> None:
    workload = helm.template().workload
    workload["spec"][where] = value
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(workload, KUBERNETES_VERSIONS[-1], strict=True)


def test_names_are_unique_and_in_the_release_namespace(rendered: Rendered) -> None:
    names = [(item["kind"], item["metadata"]["name"]) for item in rendered.objects]
    assert len(set(names)) == len(names)
    assert {item["metadata"]["namespace"] for item in rendered.objects} == {"data"}


def test_selectors_find_the_pods(rendered: Rendered) -> None:
    labels = rendered.pod["metadata"]["labels"].items()
    selectors = [rendered.workload["spec"]["selector"]["matchLabels"]]
    selectors += [item["spec"]["selector"] for item in rendered.of("Service")]
    selectors += [
        item["spec"]["selector"]["matchLabels"] for item in rendered.of("PodDisruptionBudget")
    ]
    selectors += [
        item["spec"]["podSelector"]["matchLabels"] for item in rendered.of("NetworkPolicy")
    ]
    assert len(selectors) >= 4
    assert all(selector and selector.items() <= labels for selector in selectors)


def test_the_pod_may_do_nothing_but_its_work(rendered: Rendered) -> None:
    pod, container = rendered.pod["spec"], rendered.container
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert "memory" in container["resources"]["limits"]
    writable = [m["mountPath"] for m in container["volumeMounts"] if not m.get("readOnly")]
    assert set(writable) <= {"/var/lib/quota-proxy", "/tmp"}


def test_every_mount_has_its_volume(rendered: Rendered) -> None:
    spec = rendered.workload["spec"]
    volumes = {volume["name"] for volume in rendered.pod["spec"]["volumes"]}
    claims = {claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", ())}
    assert not volumes & claims
    assert {mount["name"] for mount in rendered.container["volumeMounts"]} == volumes | claims


def test_mounts_are_directories_so_that_the_kubelet_updates_them(rendered: Rendered) -> None:
    assert not [mount for mount in rendered.container["volumeMounts"] if "subPath" in mount]


@pytest.mark.parametrize(
    ("kind", "workload"),
    [("sqlite", "StatefulSet"), ("memory", "Deployment"), ("kafka", "Deployment")],
)
def test_a_state_file_makes_a_stateful_set(helm: Helm, kind: str, workload: str) -> None:
    made = helm.template(sets={"config.state.kind": json.dumps(kind)})
    assert made.workload["kind"] == workload
    assert ("path" in made.config["state"]) == (kind == "sqlite")
    if kind == "sqlite":
        (service,) = [s for s in made.of("Service") if s["spec"].get("clusterIP") == "None"]
        assert made.workload["spec"]["serviceName"] == service["metadata"]["name"]


def test_state_in_a_topic_is_for_one_replica(helm: Helm) -> None:
    sets = {"config.state.kind": '"kafka"', "config.state.topic": '"proxy-1"'}
    assert helm.template(sets=sets).config["state"] == {"kind": "kafka", "topic": "proxy-1"}
    with pytest.raises(ChartError, match="unless they are a tier"):
        helm.template(sets={**sets, "replicas": "2"})


def test_replicas_of_a_tier_have_names_and_no_volumes(helm: Helm) -> None:
    made = helm.template(EXAMPLES["production"])
    spec = made.workload["spec"]
    assert (made.workload["kind"], spec["replicas"]) == ("StatefulSet", 3)
    assert "volumeClaimTemplates" not in spec
    host = "{machine}." + spec["serviceName"] + ".data.svc"
    assert [each["advertised_host"] for each in made.config["listeners"]] == [host]
    assert made.config["tier"]["admin_host"] == host
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] == 5 + 10 + 5 + 20
    assert made.main("PodDisruptionBudget")["spec"]["maxUnavailable"] == 1


def test_a_tier_keeps_its_state_where_all_can_read_it(helm: Helm) -> None:
    with pytest.raises(ChartError, match=r"config.tier needs config.state.kind kafka"):
        helm.template(sets={"config.tier.name": '"t"'})


def test_replicas_of_a_tier_are_not_given_one_name(helm: Helm) -> None:
    with pytest.raises(ChartError, match=r"machine proxy-1 would be the name of every replica"):
        helm.template(EXAMPLES["production"], sets={"config.tier.machine": '"proxy-1"'})


def test_each_replica_of_a_tier_has_a_load_balancer(helm: Helm) -> None:
    sets = {
        "service.type": '"LoadBalancer"',
        "service.replicaAnnotations.dns": '"{machine}.kafka.example"',
        "config.listeners[0].name": '"default"',
        "config.listeners[0].bind": '"0.0.0.0:19092"',
        "config.listeners[0].broker_ports": '"19100-19119"',
        "config.listeners[0].advertised_host": '"{machine}.kafka.example"',
    }
    made = helm.template(EXAMPLES["production"], sets=sets)
    balanced = [each for each in made.of("Service") if each["spec"].get("type") == "LoadBalancer"]
    shared, *own = balanced
    assert len(own) == 3
    for number, service in enumerate(own):
        name = f"{made.workload['metadata']['name']}-{number}"
        assert service["metadata"]["name"] == name
        assert service["metadata"]["annotations"] == {"dns": f"{name}.kafka.example"}
        assert service["spec"]["selector"]["statefulset.kubernetes.io/pod-name"] == name
        assert service["spec"]["ports"] == shared["spec"]["ports"]


def test_replicas_of_a_tier_may_ask_each_other(helm: Helm) -> None:
    sets = {"networkPolicy.enabled": "true", "networkPolicy.admins": '[{"podSelector": {}}]'}
    spec = helm.template(EXAMPLES["production"], sets=sets).main("NetworkPolicy")["spec"]
    ours = {"podSelector": spec["podSelector"]}
    own = {"port": 9645, "endPort": 9646, "protocol": "TCP"}
    assert any(ours in each.get("from", ()) and own in each["ports"] for each in spec["ingress"])
    assert any(ours in each.get("to", ()) and own in each["ports"] for each in spec["egress"])


@pytest.mark.parametrize(
    ("drain", "pre_stop", "grace_s"),
    [('"10s"', 5, 20), ('"2500ms"', 5, 13), ('"1m"', 0, 65), ('"1.5m"', 10, 105), ("0", 5, 10)],
)
def test_the_grace_period_covers_the_drain(
    helm: Helm, drain: str, pre_stop: int, grace_s: int
) -> None:
    made = helm.template(
        sets={"config.limits.drain_timeout": drain, "preStopSeconds": str(pre_stop)}
    )
    assert made.pod["spec"]["terminationGracePeriodSeconds"] == grace_s


@pytest.mark.parametrize(
    ("key", "value", "restarts"),
    [
        ("config.quotas.rules", '[{"user": "anna", "consumer_byte_rate": "1MiB"}]', False),
        ("config.throttle", '{"mode": "mute"}', False),
        ("config.progress", '{"answer_lookups": false}', False),
        (
            "config.listeners",
            '[{"name": "default", "bind": "0.0.0.0:19092", "broker_ports": "19100-19101"}]',
            True,
        ),
        ("config.cluster.bootstrap_servers", '["other:9092"]', True),
    ],
)
def test_only_what_a_reload_does_not_take_restarts_pods(
    helm: Helm, key: str, value: str, restarts: bool
) -> None:
    before, after = helm.template(), helm.template(sets={key: value})
    assert before.config != after.config
    assert (before.pod != after.pod) == restarts


@pytest.mark.parametrize("example", [None, "production"])
def test_one_more_replica_restarts_no_pod(helm: Helm, example: str | None) -> None:
    values = [EXAMPLES[example]] if example else []
    before, after = (helm.template(*values, sets={"replicas": count}) for count in ("3", "4"))
    assert after.workload["spec"]["replicas"] == 4
    assert after.pod == before.pod
    # Those that go on are to have nothing that waits for a restart.
    assert after.config == before.config


def test_probes_reach_the_admin_port(rendered: Rendered) -> None:
    container = rendered.container
    ports = {port.get("name"): port["containerPort"] for port in container["ports"]}
    assert rendered.config["admin"]["bind"].endswith(f":{ports['admin']}")
    for probe, path in (
        ("startup", "/healthz"),
        ("liveness", "/healthz"),
        ("readiness", "/readyz"),
    ):
        scheme = "HTTPS" if "tls" in rendered.config["admin"] else "HTTP"
        asked = {"path": path, "port": "admin", "scheme": scheme}
        assert container[f"{probe}Probe"]["httpGet"] == asked


def test_the_service_monitor_finds_the_admin_service(helm: Helm) -> None:
    made = helm.template(sets=EVERYTHING_ON)
    (monitor,) = made.of("ServiceMonitor")
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    found = [s for s in made.of("Service") if wanted <= s["metadata"]["labels"].items()]
    (service,) = found
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert endpoint["path"] == "/metrics"
    assert monitor["spec"]["namespaceSelector"] == {"matchNames": ["data"]}
    # The alerts and the dashboard look for this job.
    assert service["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "kafka-quota-proxy"


def test_the_network_policy_opens_every_port_in_use(rendered: Rendered) -> None:
    for policy in rendered.of("NetworkPolicy"):
        clients, admins = policy["spec"]["ingress"]
        kafka = rendered.main("Service")
        assert [p["port"] for p in clients["ports"]] == [p["port"] for p in kafka["spec"]["ports"]]
        assert admins["ports"] == [{"port": "admin", "protocol": "TCP"}]
        assert all(rule["from"] for rule in (clients, admins))
        _, brokers = policy["spec"]["egress"]
        assert [p["port"] for p in brokers["ports"]] == [9092, 9094]


def test_an_empty_list_of_peers_is_everybody(helm: Helm) -> None:
    """An empty `from` in the object itself would mean the same, a missing one says so."""
    (policy,) = helm.template(sets=EVERYTHING_ON).of("NetworkPolicy")
    rules = policy["spec"]["ingress"] + policy["spec"]["egress"]
    assert not [rule for rule in rules if "from" in rule or "to" in rule]


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ({"service.type": '"LoadBalancer"'}, "needs advertised_host"),
        ({"config.admin": '{"bind": "127.0.0.1:9644"}'}, "can't be reached by the kubelet"),
        ({"config.admin": '{"bind": "localhost:9644"}'}, "can't be reached by the kubelet"),
        (
            {"config.admin.tls": '{"cert_file": "/c", "key_file": "/k", "ca_file": "/a"}'},
            "the kubelet's probes have none",
        ),
        (
            {"config.admin": '{"read_needs_token": true, "open_paths": ["/readyz"]}'},
            "lacks /healthz",
        ),
        ({"podLabels": '{"app.kubernetes.io/name": "other"}'}, r"io/name is the chart's own"),
        (
            {
                "config.listeners": '[{"name": "default", "bind": "0.0.0.0:19092",'
                '"broker_ports": "1-65535"}]'
            },
            "are more than 1000",
        ),
    ],
)
def test_what_can_not_work_is_refused(helm: Helm, sets: dict[str, str], message: str) -> None:
    with pytest.raises(ChartError, match=message):
        helm.template(sets=sets)


@pytest.mark.parametrize("release", ["a.b", "1st"])
def test_a_release_after_which_no_service_may_be_called(helm: Helm, release: str) -> None:
    with pytest.raises(ChartError, match="set fullnameOverride"):
        helm.run("template", release, str(CHART))
    named = helm.run("template", release, str(CHART), "--set=fullnameOverride=proxy")
    assert "name: proxy-admin" in named


def notes_of(helm: Helm, folder: Path, values: Path, sets: dict[str, str] | None = None) -> str:
    """Helm shows the notes only to a cluster, so here a template of their name takes them in."""
    chart = shutil.copytree(CHART, folder / "chart")
    wrapper = (
        'kind: Notes\ntext: {{ include (print .Template.BasePath "/NOTES.txt") . | toJson }}\n'
    )
    (chart / "templates" / "notes.yaml").write_text(wrapper)
    made = Helm(helm.path, chart).template(values, sets=sets)
    (notes,) = (item["text"] for item in made.of("Notes"))
    return str(notes)


def test_notes_say_where_clients_connect(helm: Helm, tmp_path: Path) -> None:
    notes = notes_of(helm, tmp_path, EXAMPLES["everything"])
    assert "kafka.bootstrap.servers=quota-proxy.data.svc:19092" in notes
    assert "kafka.bootstrap.servers=reports.example:29092" in notes
    assert "3 times its quota" in notes


@pytest.mark.parametrize(
    ("sni", "names", "leads_to"),
    [
        ("broker-{node_id}.kafka.example", "broker-*.kafka.example", "team-kafka-quota-proxy."),
        (
            "broker-{node_id}.{machine}.kafka.example",
            "broker-*.team-kafka-quota-proxy-N.kafka.example",
            "team-kafka-quota-proxy-N, for each replica N.",
        ),
    ],
)
def test_notes_say_which_names_lead_where(
    helm: Helm, tmp_path: Path, sni: str, names: str, leads_to: str
) -> None:
    sets = {"config.listeners[0].tls.sni": json.dumps(sni)}
    notes = notes_of(helm, tmp_path, EXAMPLES["tenants-sni"], sets=sets)
    assert f"make a DNS record for {names}\nthat leads to the Service {leads_to}" in notes
