"""The dashboards' queries as plain PromQL, so that a Prometheus can be asked them."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

DASHBOARDS: Final = sorted((Path(__file__).parents[2] / "helm" / "dashboards").glob("*.json"))

EVERYTHING: Final = {
    "namespace": ".*",
    "instance": ".*",
    "entity": ".*",
    "query": ".*",
    "team": ".*",
    "__rate_interval": "1m",
}
"""Grafana's variables as they are when nothing is selected."""


def dashboard_queries(variables: Mapping[str, str] = EVERYTHING) -> dict[str, str]:
    """Return the PromQL of all dashboards' queries, by `DASHBOARD: PANEL / REF`.

    Raises KeyError for a variable that `variables` does not have.
    """
    return {
        f"{path.stem}: {panel['title']} / {target['refId']}": _filled(target["expr"], variables)
        for path in DASHBOARDS
        for panel in panels(json.loads(path.read_text()))
        for target in panel.get("targets", ())
    }


def panels(dashboard: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield every panel, those in collapsed rows too."""
    for panel in dashboard["panels"]:
        yield panel
        yield from panel.get("panels", ())


def _filled(expression: str, variables: Mapping[str, str]) -> str:
    return re.sub(r"\$\{?(\w+)\}?", lambda match: variables[match[1]], expression)
