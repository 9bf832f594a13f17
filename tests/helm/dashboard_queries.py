"""The dashboard's queries as plain PromQL, so that a Prometheus can be asked them."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

DASHBOARD: Final = Path(__file__).parents[2] / "helm" / "dashboards" / "kafka-quota-proxy.json"

EVERYTHING: Final = {
    "namespace": ".*",
    "instance": ".*",
    "entity": ".*",
    "__rate_interval": "1m",
}
"""Grafana's variables as they are when nothing is selected."""


def dashboard_queries(
    text: str | None = None, variables: Mapping[str, str] = EVERYTHING
) -> dict[str, str]:
    """Return the PromQL of each panel's queries, by `PANEL / REF`.

    `text` is the dashboard's JSON, by default the chart's file. Raises KeyError for a variable
    that `variables` does not have.
    """
    dashboard = json.loads(DASHBOARD.read_text() if text is None else text)
    return {
        f"{panel['title']} / {target['refId']}": _filled(target["expr"], variables)
        for panel in panels(dashboard)
        for target in panel.get("targets", ())
    }


def panels(dashboard: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield every panel, those in collapsed rows too."""
    for panel in dashboard["panels"]:
        yield panel
        yield from panel.get("panels", ())


def _filled(expression: str, variables: Mapping[str, str]) -> str:
    return re.sub(r"\$\{?(\w+)\}?", lambda match: variables[match[1]], expression)
