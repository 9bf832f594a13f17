"""Decide whether the proxy should get clients: what `/readyz` answers."""

from collections.abc import Collection
from dataclasses import dataclass

SILENCE_GRACE_S = 30.0
"""A cluster that was there may be silent for so long: clients try again for as long by themselves
(request.timeout.ms), and what goes by `/readyz` would take all proxies away at once."""

SILENT = "the Kafka cluster does not answer"
REFUSED = "the Kafka cluster does not let the proxy log in"
UNRESOLVED = "names do not resolve, and their last good addresses serve"
NOT_WRITABLE = "the state takes no writes, so overrides are refused; the log says why"


@dataclass(frozen=True, slots=True)
class Readiness:
    """What to answer."""

    reason: str | None = None
    """Why clients should go elsewhere; None: they can be served."""
    warning: str | None = None
    """What is wrong although they can be served."""


def judge(
    *,
    reachable: bool,
    was_reachable: bool,
    refusal: str | None,
    silent_s: float | None,
    loop: str | None = None,
    unresolved: Collection[str] = (),
    writable: bool,
) -> Readiness:
    """Return the readiness, from what the probes of the cluster have shown.

    `reachable` is of the last probe, `was_reachable` of any, `refusal` why the last one could not
    log in, and `silent_s` for how long none was answered; None if that is not so. `loop` is what
    leads to this proxy itself, `unresolved` are the names of brokers whose last good addresses
    serve, and `writable` is whether the state took the last write.
    """
    if reachable:
        names = f"{UNRESOLVED}: {', '.join(sorted(unresolved))}" if unresolved else None
        return Readiness(warning=NOT_WRITABLE if not writable else loop or names)
    if refusal is not None:
        text = f"{REFUSED}: {refusal}"
        # Brokers answer, and clients log in for themselves.
        return Readiness(warning=text) if was_reachable else Readiness(text)
    if was_reachable and silent_s is not None and silent_s < SILENCE_GRACE_S:
        return Readiness(warning=loop or SILENT)
    return Readiness(loop or SILENT)
