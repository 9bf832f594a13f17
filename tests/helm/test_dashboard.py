"""The dashboards: valid, complete in themselves, asking only for metrics that there are."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from chart import CHART, Helm
from dashboard_queries import DASHBOARDS, dashboard_queries, panels
from prometheus_client import PROCESS_COLLECTOR, CollectorRegistry

from metrics import Instruments, MemberInstruments, UsageInstruments
from metrics.exposition import OF_LOG, MetricTableCollector
from proxy.backpressure.backpressure import OF_BOUNDS
from proxy.pipeline.running import OF_NODES, OF_PIPELINES
from proxy.progress.progress_collector import ProgressMetricsCollector
from proxy.progress.query import ProgressSettings
from proxy.progress.query_registry import QueryRegistry
from proxy.quota.meters import OF_SENSORS

ALERTS = yaml.safe_load((CHART / "rules" / "alerts.yaml").read_text())
GRID_COLUMNS = 24


@pytest.fixture(scope="session")
def exposed() -> set[str]:
    """Names of all series that the proxy exposes, and those that Prometheus adds."""
    registry = CollectorRegistry()
    Instruments(registry, max_label_sets=1)
    MemberInstruments(registry)
    UsageInstruments(registry)
    book = QueryRegistry(ProgressSettings(), lambda _: None, lambda _: True)
    registry.register(ProgressMetricsCollector(book, lambda: 0.0, 1))
    tables = [(table, tuple) for table in (OF_SENSORS, OF_BOUNDS, OF_PIPELINES, OF_NODES, OF_LOG)]
    registry.register(MetricTableCollector(tables, lambda: 0.0, 1))
    families = [*registry.collect(), *PROCESS_COLLECTOR.collect()]
    names = {"up"}
    for family in families:
        names.add(family.name + ("_total" if family.type == "counter" else ""))
        if family.type == "histogram":
            names |= {family.name + suffix for suffix in ("_bucket", "_sum", "_count")}
    return names


def _metrics_in(query: str) -> set[str]:
    return set(re.findall(r"\b(?:kafka_quota_proxy_\w+|process_\w+|up)(?=[{\[])", query))


@pytest.mark.parametrize("panel", dashboard_queries())
def test_queries_ask_for_metrics_that_there_are(panel: str, exposed: set[str]) -> None:
    names = _metrics_in(dashboard_queries()[panel])
    assert names
    assert names <= exposed


def test_alerts_ask_for_metrics_that_there_are(exposed: set[str]) -> None:
    for group in ALERTS["groups"]:
        for rule in group["rules"]:
            names = _metrics_in(rule["expr"])
            assert names
            assert names <= exposed


def _documented() -> list[str]:
    """Return the PromQL that docs/spark.md shows."""
    text = (CHART.parent / "docs" / "spark.md").read_text()
    blocks = re.findall(r"^```promql\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = re.sub(r"^#.*\n", "", "".join(blocks), flags=re.MULTILINE)
    return re.split(r"\n(?! )", lines.strip())  # a line that goes on with another is indented


def test_documented_queries_ask_for_metrics_that_there_are(exposed: set[str]) -> None:
    assert len(_documented()) > 1
    for query in _documented():
        names = set(re.findall(r"kafka_quota_proxy_\w+", query))
        assert names
        assert names <= exposed


def test_queries_are_promql(promtool: Callable[..., str], tmp_path: Path) -> None:
    queries = [*dashboard_queries().values(), *_documented()]
    rules = [{"record": f"query:{n}", "expr": expr} for n, expr in enumerate(queries)]
    path = tmp_path / "queries.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"{len(queries)} rules found" in promtool("check", "rules", path)


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_say_what_they_show_and_do_not_overlap(path: Path) -> None:
    dashboard = json.loads(path.read_text())
    assert dashboard["uid"] == path.stem
    taken: set[tuple[int, int]] = set()
    ids = set()
    for panel in panels(dashboard):
        ids.add(panel["id"])
        grid = panel["gridPos"]
        assert grid["x"] + grid["w"] <= GRID_COLUMNS
        cells = {
            (grid["x"] + column, grid["y"] + line)
            for column in range(grid["w"])
            for line in range(grid["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["description"]
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert panel["fieldConfig"]["defaults"]["unit"]
    assert len(ids) == len(list(panels(dashboard)))


def test_the_chart_carries_the_dashboards_unchanged(helm: Helm) -> None:
    made = helm.template(sets={"dashboard.enabled": "true"})
    (config_map,) = [
        item for item in made.of("ConfigMap") if "grafana_dashboard" in item["metadata"]["labels"]
    ]
    assert config_map["data"].keys() == {path.name for path in DASHBOARDS}
    for path in DASHBOARDS:
        assert json.loads(config_map["data"][path.name]) == json.loads(path.read_text())
