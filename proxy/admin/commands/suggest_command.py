"""`quota-proxy suggest`: prints rules that would fit what was observed."""

import sys
from urllib.parse import quote

from proxy.admin.commands.admin_client import AdminAddress, ask_admin
from proxy.admin.rates.suggestion_routes import SUGGESTIONS_PATH


def run_suggest(address: AdminAddress, since: str) -> int:
    """Print rules as YAML; return the exit code. Raises AdminRefusal."""
    path = f"{SUGGESTIONS_PATH}?since={quote(since, safe='')}"
    sys.stdout.write(ask_admin(address, path, "yaml"))
    return 0
