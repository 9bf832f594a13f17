"""Names of members of a tier: a worker's number, with its machine before it."""

MACHINE_SEPARATOR = "/"

ONLY_MEMBER = "0"
"""The name of a process without workers."""


def member_name(number: int, machine: str) -> str:
    """Return the name of a worker as a member of a tier."""
    return f"{machine}{MACHINE_SEPARATOR}{number}"


def machine_of(member: str) -> str:
    """Return the machine of a member of a tier; empty for another name."""
    return member.rpartition(MACHINE_SEPARATOR)[0]
