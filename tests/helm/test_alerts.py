"""The alerts fire when they should: as a file, which the chart renders."""

from collections.abc import Callable

import yaml
from chart import CHART, Helm

RULES = CHART / "rules"
TESTS = sorted(RULES.glob("alerts*_test.yaml"))
Promtool = Callable[..., str]


def _names(groups: dict[str, list[dict[str, list[dict[str, str]]]]]) -> set[str]:
    return {rule["alert"] for group in groups["groups"] for rule in group["rules"]}


def test_alerts_fire_when_they_should(promtool: Promtool) -> None:
    promtool("check", "rules", "--lint-fatal", RULES / "alerts.yaml")
    for tests in TESTS:
        assert "SUCCESS" in promtool("test", "rules", tests)


def test_the_chart_has_the_same_alerts(helm: Helm) -> None:
    (rule,) = helm.template(sets={"prometheusRule.enabled": "true"}).of("PrometheusRule")
    assert rule["apiVersion"] == "monitoring.coreos.com/v1"
    assert rule["spec"] == yaml.safe_load((RULES / "alerts.yaml").read_text())


def test_every_alert_has_a_test_in_which_it_fires() -> None:
    tests = [test for path in TESTS for test in yaml.safe_load(path.read_text())["tests"]]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    fired = {case["alertname"] for case in cases if case["exp_alerts"]}
    assert fired == _names(yaml.safe_load((RULES / "alerts.yaml").read_text()))


def _anchor(heading: str) -> str:
    """Return what a heading of the documents is linked by."""
    return heading.strip("# \n").lower().replace(" ", "-")


def test_every_alert_leads_to_its_section_of_the_runbook() -> None:
    operations = "docs/operations.md"
    lines = (CHART.parent / operations).read_text().splitlines()
    sections = {f"{operations}#{_anchor(line)}" for line in lines if line.startswith("### ")}
    (group,) = yaml.safe_load((RULES / "alerts.yaml").read_text())["groups"]
    urls = {rule["alert"]: rule["annotations"]["runbook_url"] for rule in group["rules"]}
    assert urls == {name: f"{operations}#{name.lower()}" for name in urls}
    assert set(urls.values()) == sections


def test_the_runbook_is_where_the_values_say(helm: Helm) -> None:
    base = "https://git.example/proxy/blob/main/"
    made = helm.template(
        sets={"prometheusRule.enabled": "true", "prometheusRule.runbookBase": f'"{base}"'}
    )
    (group,) = made.of("PrometheusRule")[0]["spec"]["groups"]
    for rule in group["rules"]:
        name = rule["alert"].lower()
        assert rule["annotations"]["runbook_url"] == f"{base}docs/operations.md#{name}"


def test_single_alerts_can_be_left_out(helm: Helm) -> None:
    wanted = _names(yaml.safe_load((RULES / "alerts.yaml").read_text()))
    unwanted = "KafkaQuotaProxyClientThrottled"
    made = helm.template(
        sets={"prometheusRule.enabled": "true", "prometheusRule.exclude": f'["{unwanted}"]'}
    )
    assert _names(made.of("PrometheusRule")[0]["spec"]) == wanted - {unwanted}
