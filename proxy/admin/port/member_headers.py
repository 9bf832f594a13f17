"""What a member tells another one beside a request: who asks, and who records what is changed."""

import json
from collections.abc import Mapping, Sequence
from urllib.parse import quote, unquote

from proxy.admin.audit import Author, LeftChange
from proxy.progress.query_scope import ALL_QUERIES, QueryScope

SCOPE = "X-Quota-Proxy-Scope"
"""ONE_MEMBER, by another member: the answer is to be of the one that is asked alone. It is on the
answer as well, if the request was let in."""
ONE_MEMBER = "member"
AUTHOR = "X-Quota-Proxy-Author"
"""With SCOPE: the name of who asks, percent-encoded."""
PEER = "X-Quota-Proxy-Peer"
"""With SCOPE: the address of who asks; missing where there is none."""
QUERIES_HEADER = "X-Quota-Proxy-Queries"
"""With SCOPE, on which queries who asks may report: patterns, percent-encoded, with commas between
them; missing where on all."""
LEAVE_AUDIT = "X-Quota-Proxy-Leave-Audit"
"""With SCOPE, set to 1: the member records nothing, but says in CHANGES what is to be recorded."""
CHANGES = "X-Quota-Proxy-Changes"
"""Of an answer: changes as JSON, percent-encoded."""


def headers_of(author: Author, *, leaves_audit: bool = False) -> dict[str, str]:
    """Return the headers of a request to a member, which say who asks."""
    headers = {SCOPE: ONE_MEMBER, AUTHOR: quote(author.name, safe="")}
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


def written_changes(changes: Sequence[LeftChange]) -> str:
    """Return changes as the header CHANGES has them."""
    return quote(json.dumps(changes), safe="")
