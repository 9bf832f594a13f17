"""What a machine tells of the tier that it is in."""

from collections.abc import Callable

from proxy.state import Document

TierOf = Callable[[], Document | None]
"""Gives the `tier` of the status: `name`, `generation`, and `machines`, each with its `name` and
`rules`, a digest of the rules that it goes by, None where it is not known; None outside of a tier.
"""


def differing_rules(tier: Document) -> str | None:
    """Return what is wrong where the machines do not go by the same rules."""
    known = [each for each in tier.get("machines", ()) if each.get("rules")]
    if len({each["rules"] for each in known}) <= 1:
        return None
    told = ", ".join(f"{each['name']} by {each['rules']:.12}" for each in known)
    return f"the machines go by different rules: {told}; give all the same configuration"
