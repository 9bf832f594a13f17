"""Follows the cluster's own client quotas, so that `kafka-configs.sh` drives the proxy."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from kafka.protocol.admin import DescribeClientQuotasRequest
from prometheus_client import Counter
from structlog import get_logger

from proxy.cluster.kafka_client import KafkaClient
from proxy.cluster.upstream import UpstreamError
from proxy.quota.entities import DEFAULT, QuotaKind
from proxy.quota.rules import Rule

POLL_INTERVAL_S = 5.0
"""Between two questions for the quotas. Kafka announces no change."""

PLACE = "Kafka client quota"
"""Where such a rule stands, for people."""

_VERSION = 0  # all that is needed is in it, and brokers know it since 2.6

_PERSONS = {"user", "client-id"}
"""Kinds of entity that a rule can have. Kafka has `ip` too, which bounds new connections."""

_log = get_logger(__name__)


@dataclass(slots=True, eq=False)
class KafkaQuotaPoller:
    """Hands all rules of the cluster to `use`, in the place of those before, while it is followed.

    Where the quotas can't be read, the last ones stay in force; the log says so once, and `errors`
    counts every failure by reason.
    """

    _client: KafkaClient
    _use: Callable[[tuple[Rule, ...]], Awaitable[None]]
    _errors: Counter
    _followed: asyncio.Event = field(default_factory=asyncio.Event)
    _answers: bool | None = None
    """Whether the last request was answered; None before the first one."""
    _rules: tuple[Rule, ...] = ()

    async def follow(self, on: bool) -> None:
        """Begin to follow the cluster, or stop and let its rules go."""
        if on:
            self._followed.set()
        elif self._followed.is_set():
            self._followed.clear()
            self._answers, self._rules = None, ()
            await self._use(())

    async def watch(self) -> None:
        """Ask again and again while it is to follow, until cancelled."""
        try:
            while True:
                await self._followed.wait()
                await self._poll()
                await asyncio.sleep(POLL_INTERVAL_S)
        finally:
            self._client.close()

    async def _poll(self) -> None:
        try:
            rules = await self._read()
        except UpstreamError as error:
            self._errors.labels(error.reason).inc()
            if self._answers is not False:
                about = {"reason": error.reason, "error": str(error), "rules": len(self._rules)}
                _log.warning("quotas of the cluster not read, the last ones stay", **about)
            self._answers = False
            return
        if not self._followed.is_set():  # stopped in the meantime
            return
        if not self._answers or rules != self._rules:
            _log.info("quotas of the cluster read", rules=len(rules))
        self._answers, self._rules = True, rules
        await self._use(rules)

    async def _read(self) -> tuple[Rule, ...]:
        """Return the rules that the cluster has now. Raises UpstreamError."""
        request = DescribeClientQuotasRequest[_VERSION](components=[], strict=False)
        response = await self._client.ask(request)
        if response.error_code:
            text = f"error {response.error_code}: {response.error_message}"
            fix = "the proxy needs the right DescribeConfigs on the cluster"
            raise UpstreamError("quotas_refused", f"{text}; {fix}")
        try:
            return rules_of(response.entries or ())
        except Exception as error:  # who knows what answers at that address
            raise UpstreamError("bad_response", f"no client quotas: {error}") from error


def rules_of(entries: Iterable[Any]) -> tuple[Rule, ...]:
    """Turn the entries of a DescribeClientQuotas response into rules, in the order of their keys.

    Left out: entities other than users and client ids, values other than our three quotas, and
    entities that only have such. A name that is literally DEFAULT cannot be told from Kafka's
    nameless default entity, and is left out too.
    """
    rules = filter(None, map(_rule, entries))
    return tuple(sorted(rules, key=lambda rule: rule.selector))


def _rule(entry: Any) -> Rule | None:
    names = {part.entity_type: part.entity_name for part in entry.entity}
    values = {value.key: value.value for value in entry.values}
    bounds = {kind: values[kind] for kind in QuotaKind if 0 < values.get(kind, 0) < math.inf}
    is_ours = names and names.keys() <= _PERSONS and not {"", DEFAULT} & {*names.values()}
    if not is_ours or not bounds:
        return None
    keys = {kind: DEFAULT if name is None else name for kind, name in names.items()}
    return Rule(user=keys.get("user"), client_id=keys.get("client-id"), bounds=bounds, place=PLACE)
