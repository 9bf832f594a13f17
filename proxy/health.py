"""Says how one process that relays is doing: for `/readyz`, the status page and the metrics."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from proxy.admin.document_models import iso
from proxy.config.secrets import Certificate
from proxy.relay.brokers import BrokerConnector
from proxy.relay.relay import Relay
from proxy.relay.services import Services
from proxy.state import Document, ProbedStore

KEPT_LOADS = 20  # of the configuration, that are remembered

SILENCE_GRACE_S = 30.0
"""A cluster that was there may be silent for so long: clients try again for as long by themselves
(request.timeout.ms), and what goes by `/readyz` would take all proxies away at once."""

SILENT = "the Kafka cluster does not answer"
REFUSED = "the Kafka cluster does not let the proxy log in"
UNRESOLVED = "names do not resolve, and their last good addresses serve"
NOT_WRITABLE = "the state takes no writes, so overrides are refused; the log says why"


class ReadinessProblems(NamedTuple):
    """Why clients should go elsewhere, and what is wrong although they can be served."""

    reason: str | None = None
    warning: str | None = None


def assess_readiness(
    brokers: BrokerConnector, now_s: float, *, writable: bool
) -> ReadinessProblems:
    """Return the readiness, from what the probes of the cluster have shown until now.

    `writable` is whether the state took the last write.
    """
    loop, refusal, since_s = brokers.loop, brokers.refusal, brokers.silent_since_s
    if brokers.reachable:
        failing = sorted(brokers.bootstrap.resolver.failing())
        names = f"{UNRESOLVED}: {', '.join(failing)}" if failing else None
        return ReadinessProblems(warning=NOT_WRITABLE if not writable else loop or names)
    if refusal is not None:
        text = f"{REFUSED}: {refusal}"
        # Brokers answer, and clients log in for themselves.
        return ReadinessProblems(warning=text) if brokers.was_reachable else ReadinessProblems(text)
    if brokers.was_reachable and since_s is not None and now_s - since_s < SILENCE_GRACE_S:
        return ReadinessProblems(warning=loop or SILENT)
    return ReadinessProblems(loop or SILENT)


class Health:
    """Reads it from the parts, also for the metrics; `certificates` gives those shown now."""

    def __init__(
        self,
        relay: Relay,
        services: Services,
        store: ProbedStore,
        certificates: Callable[[], Sequence[Certificate]],
    ) -> None:
        self._relay, self._services = relay, services
        self._store, self._certificates = store, certificates
        self.loads = deque([_load("ok", "loaded at the start")], maxlen=KEPT_LOADS)
        """Of the configuration, the newest first."""
        for result in ("ok", "failed"):  # one that is there from the start shows its first increase
            services.instruments.config_reloads_total.labels(result)
        instruments, brokers, quotas = services.instruments, relay.brokers, services.quotas
        instruments.connections_limit.set_function(lambda: services.limits.max_connections)
        instruments.silent_connections.set_function(lambda: len(relay.silent))
        instruments.cluster_reachable.set_function(lambda: brokers.answers)
        instruments.login_refused.set_function(lambda: brokers.refusal is not None)
        instruments.state_writable.set_function(lambda: store.writable)
        instruments.rules_not_enforced.set_function(lambda: quotas.settings.observed_rules)
        loaded = instruments.config_last_reload_successful
        loaded.set_function(lambda: self.loads[0]["result"] == "ok")
        for name, listener in relay.listeners.items():
            instruments.brokers_without_port.labels(name).set_function(
                listener.without_port.__len__
            )
        self.show_certificates()

    def record_load(self, result: str, message: str) -> None:
        """Count a load of the configuration that was just made, and remember it."""
        self._services.instruments.config_reloads_total.labels(result).inc()
        self.loads.appendleft(_load(result, message))

    def relay_status(self) -> Document:
        """Return what the status shows of the relay, the cluster and the configuration."""
        return {
            "listeners": [
                {
                    "name": name,
                    "host": listener.settings.host,
                    "port": listener.bootstrap_port,
                    "tls": listener.settings.tls is not None,
                    "connections": self._relay.connected_through[name],
                }
                for name, listener in self._relay.listeners.items()
            ],
            "brokers": [
                {"node_id": node_id, "host": host, "port": port}
                for node_id, (host, port) in sorted(self._relay.brokers.addresses.items())
            ],
            "cluster_answers": self._relay.brokers.answers,
            "delay_queues": {each.api: len(each) for each in self._services.reapers.all},
            "config_loads": list(self.loads),
            "throttle_mode": "delay" if self._services.holds else "mute",
            "certificates": [
                {"section": each.section, "file": each.file, "not_after": iso(each.not_after_s)}
                for each in self._certificates()
            ],
        }

    def readiness(self) -> ReadinessProblems:
        """Return whether clients can be served."""
        now_s = self._services.loop.time()
        return assess_readiness(self._relay.brokers, now_s, writable=self._store.writable)

    def show_certificates(self) -> None:
        """Show when the certificates expire that were just loaded."""
        expiry = self._services.instruments.certificate_not_after_timestamp_seconds
        expiry.clear()
        for each in self._certificates():
            expiry.labels(each.role, each.listener).set(each.not_after_s)


def _load(result: str, message: str) -> Document:
    return {"result": result, "message": message, "at": iso(time.time())}
