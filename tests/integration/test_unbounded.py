"""Clients that go around the rules by a name are shown."""

import json
from collections.abc import Callable
from contextlib import ExitStack

from support.operating import call
from support.proxy_process import ProxyProcess, until
from support.raw import RawClient, api_versions

RULES = [{"client-id": "etl", "consumer_byte_rate": "1MiB"}]
NAMES = ("ETL", "et\N{ZERO WIDTH SPACE}l", None)


def shown(process: ProxyProcess) -> set[str | None]:
    answer = json.loads(process.get("/v1/clients")[1])
    clients = answer["unbounded_clients"]
    assert len(clients) == answer["unbounded"]
    return {client["client_id"] for client in clients}


def test_clients_that_no_rule_bounds_are_shown_as_long_as_that_is_so(
    proxy: Callable[..., ProxyProcess],
) -> None:
    process = proxy(rules=RULES)
    with ExitStack() as stack:
        first = stack.enter_context(RawClient(process.bootstrap, NAMES[0]))
        for client_id in ("etl", *NAMES[1:]):
            stack.enter_context(RawClient(process.bootstrap, client_id)).ask(api_versions(3))
        first.ask(api_versions(3))
        assert shown(process) == set(NAMES)
        assert process.metrics().value("unbounded_clients") == len(NAMES)
        # Nobody sends anything from here on.
        catch_all = {"consumer_byte_rate": "1MiB"}
        assert call(process, "PUT", "/v1/quotas/client-id=<default>", catch_all).status == 200
        until(lambda: not shown(process), "a rule for all")
        assert call(process, "DELETE", "/v1/quotas/client-id=<default>").status == 200
        until(lambda: shown(process) == set(NAMES), "no rule for all")
    until(lambda: not shown(process), "all are gone")
