"""The admin port of one machine: a gateway to its workers."""

import ssl
from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest

from metrics import MemberScrape, MergedMetrics
from proxy.admin.gateway.gateway import Gateway, MemberMetrics
from proxy.admin.gateway.member_client import MemberEndpoint
from proxy.config import Config
from proxy.config.secrets import Secrets
from proxy.parts import access_of, port_limits_of
from proxy.workers.post import Post, looping
from proxy.workers.slot_sharing import SlotSharing

SUPERVISOR = "supervisor"
"""Stands for the supervisor itself among the members whose metrics are merged."""


def make_gateway(
    config: Config,
    secrets: Secrets,
    posts: Sequence[Post],
    registry: CollectorRegistry,
    sharing: SlotSharing,
) -> Gateway:
    """Make it; `registry` has the supervisor's own metrics."""
    admin = config.admin
    merged = MergedMetrics(max_label_sets=config.limits.max_client_entities)

    def merge(texts: Mapping[str, MemberMetrics | None]) -> bytes:
        scrapes: dict[str, MemberScrape | None] = {SUPERVISOR: own()}
        for name, each in texts.items():
            scrapes[name] = None if each is None else MemberScrape.read(each.text, each.run)
        return merged.merge(scrapes)

    def own() -> MemberScrape:
        return MemberScrape.read(generate_latest(registry), 0)

    def query_client(name: str) -> str:
        return next((each.client_id for each in config.queries if each.name == name), name)

    tls: ssl.SSLContext | None = secrets.admin
    return Gateway(
        admin.bind.host,
        admin.bind.port,
        members=lambda: [*map(_endpoint, posts), *sharing.machines()],
        owner_of=sharing.owner_of_client,
        first=lambda: sharing.first,
        merge_metrics=merge,
        access=access_of(config, secrets),
        not_ready=lambda: sharing.not_ready,
        warning=lambda: _warning(posts, sharing),
        slots=sharing.documents,
        client_of=query_client,
        limits=port_limits_of(config),
        tls=tls,
        tier_routes=sharing.tier_routes,
        tier=sharing.tier,
    )


def _endpoint(post: Post) -> MemberEndpoint:
    return MemberEndpoint(
        post.name, path=post.admin_path, alive=post.serves, run=post.restarts.count
    )


def _warning(posts: Sequence[Post], sharing: SlotSharing) -> str | None:
    warnings = [sharing.warning] if sharing.warning is not None else []
    if names := looping(posts):
        text = f"workers that crash again and again: {', '.join(names)}; the log says why"
        warnings.append(text)
    return "; ".join(warnings) or None
