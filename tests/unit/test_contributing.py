"""Tables of docs are those of the code; this file, run as a script, writes them anew."""

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

sys.path.append(str(Path(__file__).parents[1]))  # as a script it has no conftest.py

from parts.instrument_rows import InstrumentRow, rows_of
from parts.query_world import configured, learn_end
from parts.reports import ReportingDriver, batch_document, parsed

from metrics import Instruments, MemberInstruments, UsageInstruments
from metrics.exposition import OF_LOG, PREFIX, TOTAL
from proxy.admin.client_documents import BUDGET, CLIENT, CONNECTION, HOLD, UNBOUNDED
from proxy.admin.document_models import DocumentModel
from proxy.admin.peers.merged_documents import MEMBER_ROW
from proxy.admin.pipeline_documents import COMPLETION, NODE, PIPELINE_ROW, STAGE
from proxy.admin.query_documents import PARTITION, QUERY
from proxy.admin.rule_documents import BUDGET_RULE, PAUSE, RULE
from proxy.admin.suggestions import SUGGESTION
from proxy.backpressure.backpressure import OF_BOUNDS
from proxy.pipeline.running import OF_NODES, OF_PIPELINES
from proxy.progress.events import ProgressEventKind
from proxy.progress.progress_collector import ProgressMetricsCollector
from proxy.progress.query_registry import QueryRegistry
from proxy.quota.meters import OF_SENSORS
from proxy.wire.layout import run_generator

ROOT = Path(__file__).parents[2]
CONTRIBUTING = ROOT / "docs" / "contributing.md"
API = "api.md"
MODELS: Mapping[tuple[str, str], DocumentModel[Any]] = {
    (API, "rule"): RULE,
    (API, "budget rule"): BUDGET_RULE,
    (API, "pause"): PAUSE,
    (API, "suggestion"): SUGGESTION,
    (API, "client"): CLIENT,
    (API, "budget"): BUDGET,
    (API, "unbounded"): UNBOUNDED,
    (API, "connection"): CONNECTION,
    (API, "hold"): HOLD,
    ("api-queries.md", "query"): QUERY,
    ("api-queries.md", "partition"): PARTITION,
    ("api-queries.md", "pipeline"): PIPELINE_ROW,
    ("api-queries.md", "completion"): COMPLETION,
    ("api-queries.md", "node"): NODE,
    ("api-queries.md", "stage"): STAGE,
    ("admin-port.md", "member"): MEMBER_ROW,
}
"""By the pages of their tables, and what begins them there."""


def _progress() -> ProgressMetricsCollector:
    """Return what a proxy shows that follows one partition, has had one batch and gives advice."""
    queries = QueryRegistry(configured("orders"), lambda _: None, lambda _: True)
    batch = batch_document(0, 0, 5, "orders", latest=9, rows=5)
    driver = ReportingDriver()
    trigger = {"kind": "processing_time", "interval_ms": 1000}
    for report in (
        driver.document("started", trigger=trigger),
        driver.document("progress", batch=batch),
    ):
        accepted = run_generator(queries.accepting(parsed(report), 0.0, 0.0))
    accepted.query.advise(ProgressEventKind.INTERVAL, "another one", 0.0)
    learn_end(queries, "orders", 0, 9, 0.0)
    return ProgressMetricsCollector(queries, lambda: 0.0, 10)


def metric_rows() -> Iterator[InstrumentRow]:
    """Yield every metric that the proxy registers."""
    instruments = Instruments(CollectorRegistry(), max_label_sets=1)
    yield from rows_of(instruments)
    yield from rows_of(MemberInstruments(CollectorRegistry()))
    yield from rows_of(UsageInstruments(CollectorRegistry()))
    for labels, figures in (OF_SENSORS, OF_BOUNDS, OF_PIPELINES, OF_NODES, OF_LOG):
        for name, (text, _) in figures.items():
            kind = "counter" if name.endswith(TOTAL) else "gauge"
            yield InstrumentRow(PREFIX + name, kind, labels, text)
    for family in _progress().collect():
        labels = tuple(name for name in next(iter(family.samples)).labels if name != "le")
        name = family.name + (TOTAL if family.type == "counter" else "")
        yield InstrumentRow(name, family.type, labels, family.documentation)


def metric_table() -> str:
    """Return the table of all metrics, by name."""
    lines = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for row in sorted(metric_rows()):
        labels = ", ".join(f"`{label}`" for label in row.labels)
        lines.append(f"| `{row.name}` | {row.type} | {labels} | {row.meaning} |")
    return "\n".join(lines) + "\n"


def field_table(model: DocumentModel[Any]) -> str:
    """Return the table of a document's fields."""
    rows = (f"| `{names.replace(', ', '`, `')}` | {text} |" for names, text in model.texts.items())
    return "\n".join(("| field | |", "|---|---|", *rows, ""))


def tables() -> Iterator[tuple[Path, str, str]]:
    """Yield each table: its file, what stands before it, and what it is."""
    yield CONTRIBUTING, "<!-- metrics: begin -->\n", metric_table() + "<!-- metrics: end -->\n"
    for (page, name), model in MODELS.items():
        table = field_table(model) + "<!-- end -->\n"
        yield ROOT / "docs" / page, f"<!-- fields: {name} -->\n", table


def test_the_tables_are_those_of_the_code() -> None:
    for path, begin, table in tables():
        _, begun, rest = path.read_text().partition(begin)
        assert begun, f"{path.name} lacks {begin}"
        assert rest.startswith(table), f"{path.name} is old: run `make docs`"


def test_the_paths_of_the_steps_exist() -> None:
    paths = re.findall(
        r"`((?:proxy|metrics|tests|docs|helm|examples)/[\w./-]+)`", CONTRIBUTING.read_text()
    )
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


def _anchors(page: Path) -> set[str]:
    """Return what links to a page's headings end with, as GitHub makes it."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in headings}


def test_links_lead_to_pages_and_headings_that_are_there() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    wrong = [
        f"{page.name}: {target}"
        for page in pages
        for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text())
        for path, _, heading in [target.partition("#")]
        for to in [page.parent / path if path else page]
        if not to.exists() or (heading and heading not in _anchors(to))
    ]
    assert wrong == []


if __name__ == "__main__":
    for file, first_line, current in tables():
        head, tail = file.read_text().split(first_line)
        end = current.splitlines(keepends=True)[-1]
        file.write_text(head + first_line + current + tail.partition(end)[2])
