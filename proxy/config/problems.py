"""What can be wrong with a configuration, in the words that its author reads."""

from collections.abc import Iterable
from dataclasses import dataclass

Loc = tuple[str | int, ...]
"""Where a value stands in the document: keys and list positions from the top down."""

WHOLE_FILE = 0
"""The line number of a problem that concerns the file and no line of it."""


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """One mistake in a configuration file.

    Attributes:
        file: the file as its user named it.
        line: counted from 1; `WHOLE_FILE` (0) when no line is to blame.
        key: the path of the key, such as `quotas.rules[2].user`; empty for the whole document.
        message: what is wrong.
        fix: how to mend it.

    """

    file: str
    line: int
    key: str
    message: str
    fix: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        subject = f"{self.key}: " if self.key else ""
        return f"{place}: {subject}{self.message}\n    fix: {self.fix}"


class ConfigError(Exception):
    """A configuration file that cannot be used; `problems` holds every mistake, in line order.

    `str()` is the whole text for the user: one block, two lines for each problem.
    """

    def __init__(self, problems: Iterable[ConfigProblem]) -> None:
        self.problems = tuple(sorted(problems, key=lambda problem: problem.line))
        super().__init__("\n".join(str(problem) for problem in self.problems))


def key_path(loc: Loc) -> str:
    """Write a place as users do: `("quotas", "rules", 2, "user")` is `quotas.rules[2].user`."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part}" if path else part
    return path
