"""What a gateway tells a member beside the request: who asks, and who records what is changed."""

from collections.abc import Mapping
from urllib.parse import quote, unquote

from proxy.admin.audit import Author
from proxy.progress.query_scope import ALL_QUERIES, QueryScope

AUTHOR = "X-Quota-Proxy-Author"
"""The name of who asks, percent-encoded."""
PEER = "X-Quota-Proxy-Peer"
"""The address of who asks; missing where there is none."""
QUERIES_HEADER = "X-Quota-Proxy-Queries"
"""On which queries who asks may report: patterns, percent-encoded, with commas between them;
missing where on all."""
LEAVE_AUDIT = "X-Quota-Proxy-Leave-Audit"
"""Set to 1: the member records nothing, but says in CHANGES what is to be recorded."""
CHANGES = "X-Quota-Proxy-Changes"
"""Of an answer: changes as JSON, percent-encoded."""
SCOPE = "X-Quota-Proxy-Scope"
"""ONE_MACHINE, by the gateway of another machine: the answer is to be of this one alone."""
ONE_MACHINE = "machine"
ONLY = "X-Quota-Proxy-Only"
"""With SCOPE: the name of the one member that is asked there."""
FIRST_HEADER = "X-Quota-Proxy-First"
"""With SCOPE: the name of the member that records its changes; all others leave theirs."""


def headers_of(author: Author, *, leaves_audit: bool = False) -> dict[str, str]:
    """Return the headers that say who asks."""
    headers = {AUTHOR: quote(author.name, safe="")}
    if author.address is not None:
        headers[PEER] = author.address
    if author.queries.patterns is not None:
        headers[QUERIES_HEADER] = ",".join(quote(each, safe="") for each in author.queries.patterns)
    if leaves_audit:
        headers[LEAVE_AUDIT] = "1"
    return headers


def author_of(headers: Mapping[str, str], unnamed: str) -> Author:
    """Return who asks, by headers that are to be believed."""
    name = unquote(headers.get(AUTHOR, ""), errors="replace") or unnamed
    queries = ALL_QUERIES
    if (patterns := headers.get(QUERIES_HEADER)) is not None:
        queries = QueryScope(tuple(map(unquote, patterns.split(","))))
    return Author(name, headers.get(PEER), queries)
