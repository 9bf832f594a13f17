"""Tokens with their rights, and how they are shown."""

from base64 import b64encode
from dataclasses import replace

from proxy.admin.port.guard import AccessRight, AccessRules, AdminToken

TOKENS = (
    AdminToken("ops", "ops-text"),
    AdminToken("spark", "spark-text", (AccessRight.REPORT,)),
    AdminToken("desk", "desk-text", (AccessRight.READ,)),
    AdminToken("night", "night-text", (AccessRight.QUOTAS,)),
)
OPEN = AccessRules(TOKENS, hosts=("proxy.example",))
"""Reading is open to all."""
CLOSED = replace(OPEN, read_needs_token=True)


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}-text"}


def password(name: str, user: str = "") -> dict[str, str]:
    """What a browser sends whose user gave a token as password."""
    shown = b64encode(f"{user}:{name}-text".encode()).decode()
    return {"Authorization": f"Basic {shown}"}
