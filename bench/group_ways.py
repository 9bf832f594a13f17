"""The ways to a broker on which groups are compared: Kafka's own quota, and the proxy's two modes.

Two brokers have the same settings. One holds every client to the bound by itself and is asked
directly; both proxies stand before the other, which has no quotas.
"""

import os
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from bench.lab import Lab, Proxy, rule
from bench.processes import BenchError
from examples.devkit.broker import EmbeddedBroker
from examples.devkit.jars import kafka_jars
from examples.devkit.java import find_java

BOUND_BYTES = 250_000
OWN = "own"
MODES = ("delay", "mute")
# Kafka's default, which the devkit shortens: members that start together join as one generation.
BROKER_PROPERTIES = {"group.initial.rebalance.delay.ms": "3000"}
TOOL_TIMEOUT_S = 60.0
PREFIX = "kafka_quota_proxy_"


@dataclass(frozen=True, slots=True)
class Holds:
    """How long a proxy held responses, in seconds, as upper bounds of histogram buckets."""

    count: int
    p50: float
    p90: float
    longest: float

    def __str__(self) -> str:
        if not self.count:
            return "no holds"
        return (
            f"{self.count} holds, p50 <= {self.p50:g} s, p90 <= {self.p90:g} s, "
            f"longest <= {self.longest:g} s"
        )


@dataclass(frozen=True, slots=True)
class Way:
    """Where a client connects to be held to the bound; `proxy` is None with Kafka's own quota.

    `mode` is the proxy's, or "own".
    """

    mode: str
    bootstrap: str
    proxy: Proxy | None = None

    @property
    def is_own(self) -> bool:
        """Whether this is Kafka's own quota."""
        return self.proxy is None

    @property
    def name(self) -> str:
        """As printed in the table."""
        return "Kafka's own quota" if self.is_own else self.mode

    def holds(self) -> Holds | None:
        """Return the holds of Fetch responses so far; None without a proxy."""
        if self.proxy is None:
            return None
        buckets = sorted(
            (float(sample.labels["le"]), int(sample.value))
            for sample in _samples(self.proxy, "throttle_seconds_bucket")
            if sample.labels["quota"] == "consumer_byte_rate"
        )
        return _holds(buckets)

    def fetch_versions(self) -> dict[str, int] | None:
        """Return the Fetch requests so far by version; None without a proxy."""
        if self.proxy is None:
            return None
        versions: Counter[str] = Counter()
        for sample in _samples(self.proxy, "requests_total"):
            if sample.labels["api"] == "Fetch":
                versions[sample.labels["version"]] += int(sample.value)
        return dict(versions)


@dataclass(frozen=True, slots=True)
class Brokers:
    """The two brokers: one with the quota set, one without."""

    own: EmbeddedBroker
    plain: EmbeddedBroker

    @classmethod
    def start(cls, lab: Lab) -> "Brokers":
        """Start both and set the quota on the first one, for every client id."""
        own, plain = (
            lab.enter(EmbeddedBroker(lab.work_dir / name, properties=BROKER_PROPERTIES))
            for name in ("broker-own", "broker-plain")
        )
        _set_quota(own.bootstrap)
        return cls(own, plain)

    def ways(self, lab: Lab) -> list[Way]:
        """Start one proxy per mode and return all ways, Kafka's own quota first."""
        host, _, port = self.plain.bootstrap.rpartition(":")
        rules = [rule("<default>", f"{BOUND_BYTES // 1000}kB")]
        ways = [Way(OWN, self.own.bootstrap)]
        for mode in MODES:
            proxy = lab.start_proxy((host, int(port)), rules, mode=mode, pinned=False)
            ways.append(Way(mode, "{}:{}".format(*proxy.bootstrap), proxy))
        return ways


def _set_quota(bootstrap: str) -> None:
    """Set the default quota of all client ids with Kafka's own tool, `kafka-configs`."""
    class_path = os.pathsep.join(map(str, kafka_jars()))
    command = [str(find_java()), "-cp", class_path, "kafka.admin.ConfigCommand"]
    command += ["--bootstrap-server", bootstrap, "--alter"]
    command += ["--add-config", f"consumer_byte_rate={BOUND_BYTES}"]
    command += ["--entity-type", "clients", "--entity-default"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise BenchError(f"kafka-configs: {error}") from error
    if "Completed updating" not in done.stdout:
        raise BenchError(f"kafka-configs: {done.stdout}{done.stderr}")


def _samples(proxy: Proxy, name: str) -> list[Sample]:
    return [
        sample
        for family in text_string_to_metric_families(proxy.metrics())
        for sample in family.samples
        if sample.name == PREFIX + name
    ]


def _holds(buckets: Sequence[tuple[float, int]]) -> Holds:
    """Read quantiles off cumulative buckets (upper bound in seconds, holds up to it)."""
    count = buckets[-1][1] if buckets else 0
    if not count:
        return Holds(0, 0.0, 0.0, 0.0)
    p50, p90, longest = (
        next(bound for bound, held in buckets if held >= share * count) for share in (0.5, 0.9, 1.0)
    )
    return Holds(count, p50, p90, longest)
