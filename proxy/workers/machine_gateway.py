"""The admin port of one machine: a gateway to its workers."""

import ssl
from collections.abc import Sequence

from metrics import MemberInstruments
from proxy.admin.gateway.gateway import Gateway
from proxy.admin.gateway.member_client import MemberEndpoint
from proxy.config import Config
from proxy.config.secrets import Secrets
from proxy.parts import access_of, port_limits_of
from proxy.workers.post import Post, looping
from proxy.workers.slot_sharing import SlotSharing


def make_gateway(
    config: Config,
    secrets: Secrets,
    posts: Sequence[Post],
    metrics: MemberInstruments,
    sharing: SlotSharing,
) -> Gateway:
    """Make it; `metrics` are the supervisor's own."""
    admin = config.admin

    def query_client(name: str) -> str:
        return next((each.client_id for each in config.queries if each.name == name), name)

    tls: ssl.SSLContext | None = secrets.admin
    return Gateway(
        admin.bind.host,
        admin.bind.port,
        members=lambda: [*map(_endpoint, posts), *sharing.machines()],
        owner_of=sharing.owner_of_client,
        first=lambda: sharing.first,
        metrics=metrics,
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
    return MemberEndpoint(post.name, path=post.admin_path, alive=post.serves)


def _warning(posts: Sequence[Post], sharing: SlotSharing) -> str | None:
    warnings = [sharing.warning] if sharing.warning is not None else []
    if names := looping(posts):
        text = f"workers that crash again and again: {', '.join(names)}; the log says why"
        warnings.append(text)
    return "; ".join(warnings) or None
