"""`quota-proxy pause` and `resume`: let clients through, and hold them to quotas again."""

import sys
from collections.abc import Mapping

from proxy.admin.commands.admin_client import AdminAddress, fetch_document
from proxy.admin.commands.top_tables import printable
from proxy.admin.throttling_routes import THROTTLING_PATH


def run_pause(
    address: AdminAddress, keys: Mapping[str, str], how_long: str, by: str | None
) -> None:
    """Pause quotas for these clients, without keys for all."""
    _change(address, {"off": how_long, "by": by, **keys})


def run_resume(address: AdminAddress, keys: Mapping[str, str], by: str | None) -> None:
    """End the pause of these clients, without keys every one."""
    _change(address, {"on": True, "by": by, **keys})


def _change(address: AdminAddress, body: Mapping[str, object]) -> None:
    """Send a change and print what is in force then. Raises AdminRefusal."""
    key = "throttling"
    throttling = fetch_document(address, THROTTLING_PATH, {key}, body)[key]
    lines = [
        f"paused: {each['selector']} until {each['until']}, {each['left_s']:,.0f} s left"
        for each in throttling["paused"]
    ]
    if not throttling["enforced"]:
        lines.append("no quota is enforced: throttle.enforce is false in the configuration")
    for line in lines or ["all quotas are enforced"]:
        sys.stdout.write(f"{printable(line)}\n")
