"""What is no mistake in a configuration and surely not wanted: said with file, line and fix."""

from collections.abc import Callable
from pathlib import Path

import pytest

from proxy.config import load_config
from proxy.config.check_report import find_startup_hints

MINIMAL = """\
cluster: {bootstrap_servers: [broker-1:9092]}
listeners:
  - {name: a, bind: 127.0.0.1:19092, advertised_host: h, broker_ports: 19100-19199}
limits: {max_connections: 10}
"""


@pytest.fixture
def hints(tmp_path: Path) -> Callable[[str], list[str]]:
    def of(text: str) -> list[str]:
        file = tmp_path / "proxy.yaml"
        file.write_text(MINIMAL + text)
        return [line.removeprefix(f"{tmp_path}/") for line in find_startup_hints(load_config(file))]

    return of


CASES = {
    "sound": ("throttle: {max_delay: 29s}\nqueries: [{name: a b}]\n", []),
    "longer than clients wait": (
        "throttle:\n  max_delay: 1h\n",
        [
            "proxy.yaml:6: throttle.max_delay is 1h, and clients give up on a request and ask "
            "again after request.timeout.ms, 30 s by default; fix: write 20s; what is left of a "
            "hold goes into the next one"
        ],
    ),
    "as long as clients wait": ("throttle: {max_delay: 30s}\n", ["throttle.max_delay is 30s"]),
    "blanks in a rule": (
        "quotas:\n  rules:\n    - {client-id: a, consumer_byte_rate: 1}\n    - "
        '{user: x, client-id: "etl ", consumer_byte_rate: 1MB}\n',
        [
            'proxy.yaml:8: quotas.rules[1].client-id is "etl ", with blanks at an end, and fits '
            'only what has them too; fix: write "etl"'
        ],
    ),
    "blanks in a query, of which the client id is the name": (
        'queries: [{name: "\\torders"}]\n',
        ['queries[0].name is "\torders"'],
    ),
    "a longer client id than is known of any client": (
        f"quotas: {{rules: [{{client-id: {'x' * 256}, consumer_byte_rate: 1}}, "
        f"{{client-id-prefix: {'y' * 256}, consumer_byte_rate: 1}}, "
        f"{{client-id: {'z' * 255}, consumer_byte_rate: 1}}]}}\n",
        ["quotas.rules[0].client-id is", "quotas.rules[1].client-id-prefix is"],
    ),
    "a longer client id of a query": (
        f"queries: [{{name: {'x' * 256}}}]\n",
        [
            f'queries[0].name is "{"x" * 60}...", which fits no client: of an id the proxy knows '
            "255 characters; fix: use a shorter id, or a shorter client-id-prefix"
        ],
    ),
    "blanks in all that a rule names": (
        'quotas: {rules: [{user: " u", client-id-prefix: "c ", consumer_byte_rate: 1}]}\n',
        ["quotas.rules[0].user", "quotas.rules[0].client-id-prefix"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_hints_at_the_start(name: str, hints: Callable[[str], list[str]]) -> None:
    text, expected = CASES[name]
    found = hints(text)
    assert len(found) == len(expected)
    assert all(part in line for part, line in zip(expected, found, strict=True))
