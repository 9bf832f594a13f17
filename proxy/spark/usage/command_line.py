"""What the programs for spark-submit share: options, exit codes, one line for what fails."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

BAD_USAGE, RUN_FAILED = 2, 1

_CAUSE = re.compile(r"^Caused by: (.+)$", re.MULTILINE)
_JAVA_CLASS = re.compile(r"^(?:[a-z_$][\w$]*\.)+(?=[A-Z])")
_CALLED = re.compile(r"^An error occurred while calling [^\n]*\n:? ?")


class UsageInputError(ValueError):
    """What was given is of no use: the text says what, where, and how to mend it."""


class KeyValues(argparse.Action):
    """Collects KEY=VALUE into a mapping."""

    def __call__(  # noqa: D102
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        key, equals, value = values.partition("=")
        if not key or not equals:
            parser.error(f"argument {option_string}: {values!r} is not KEY=VALUE")
        setattr(namespace, self.dest, {**getattr(namespace, self.dest), key: value})


def cause_of(error: BaseException) -> str:
    """Return why Spark failed, in one line: the innermost cause of what Java says."""
    text = _CALLED.sub("", str(error).strip())
    causes = _CAUSE.findall(text)
    first = causes[-1] if causes else next(iter(text.splitlines()), "")
    return _JAVA_CLASS.sub("", first).strip() or type(error).__name__


def run_program(
    run: Callable[[argparse.Namespace], None],
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
) -> int:
    """Run with parsed arguments; return 0, 2 for bad input, or 1 with one line on what failed."""
    try:
        run(parser.parse_args(arguments))
    except UsageInputError as error:
        sys.stderr.write(f"{error}\n")
        return BAD_USAGE
    except KeyboardInterrupt:
        return RUN_FAILED
    except Exception as error:
        sys.stderr.write(f"{parser.prog}: {cause_of(error)}\n")
        return RUN_FAILED
    return 0
