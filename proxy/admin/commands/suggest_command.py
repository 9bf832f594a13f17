"""`quota-proxy suggest`: prints rules that would fit what was observed."""

import sys
from urllib.parse import quote

from proxy.admin.commands.admin_client import AdminAddress, fetch_document
from proxy.admin.rates.suggestion_routes import SUGGESTIONS_PATH


def run_suggest(address: AdminAddress, since: str) -> None:
    """Print rules as YAML. Raises AdminRefusal."""
    path = f"{SUGGESTIONS_PATH}?since={quote(since, safe='')}"
    sys.stdout.write(fetch_document(address, path, {"yaml"})["yaml"])
