"""From a file to a `Config`, or to the list of everything that is wrong with it."""

import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from proxy.config.checks import find_file_problems
from proxy.config.document import (
    ConfigError,
    ConfigProblem,
    Loc,
    YamlDocument,
    key_path,
    read_document,
)
from proxy.config.fields import Section
from proxy.config.models import Config
from proxy.quota.values import BadValueError, shown

_UNKNOWN_KEY: Final = "extra_forbidden"


def load_config(path: Path) -> Config:
    """Read a file, whose paths start at its directory. Raises ConfigError with all its mistakes."""
    document = read_document(path)
    problems = [*document.problems, *find_file_problems(document)]
    # State has a default that is a path; given as a section it is resolved like any other.
    data = {"state": {}, **document.data}
    try:
        config = Config.model_validate(data, context=path.parent)
    except ValidationError as error:
        details = error.errors(include_url=False)
        unknown = [detail["loc"] for detail in details if detail["type"] == _UNKNOWN_KEY]
        problems += _model_problems(document, details)
    else:
        unknown = []
    problems += (
        document.problem(loc, "has no value", "give it a value or remove it")
        for loc in document.empty
        if not any(loc[: len(start)] == start for start in unknown)
    )
    if problems:
        raise ConfigError(problems)
    config._places = {key_path(loc): f"{path}:{line}" for loc, line in document.lines.items()}
    return config


def _model_problems(document: YamlDocument, details: list[ErrorDetails]) -> Iterator[ConfigProblem]:
    told = {problem.key for problem in document.problems}
    for detail in details:
        # A key without a value, or one that is misread, is one mistake, whatever the model says.
        is_told = detail["loc"] in document.empty or key_path(detail["loc"]) in told
        if not is_told or detail["type"] == _UNKNOWN_KEY:
            message, fix = _words(detail)
            yield document.problem(detail["loc"], message, fix)


def _words(detail: ErrorDetails) -> tuple[str, str]:
    """Return in the user's words what pydantic found, and how to mend it."""
    loc, value = detail["loc"], detail["input"]
    reason = detail.get("ctx", {}).get("error")
    if isinstance(reason, BadValueError):
        return reason.message, reason.fix
    match detail["type"]:
        case "missing":
            section = _section(loc[:-1])
            examples = _field_by_key(section)[str(loc[-1])].examples or [f"{loc[-1]}: ..."]
            return "is missing", f"add it, for example: {examples[0]}"
        case "extra_forbidden":
            return "is not a known key", _nearest_key(loc)
        case "model_type":
            keys = ", ".join(_field_by_key(_section(loc)))
            return f"must be a mapping, not {shown(value)}", f"its keys are {keys}"
        case "literal_error":
            choices = re.findall("'([^']*)'", detail["ctx"]["expected"])
            return f"{shown(value)} is not known here", f"write {' or '.join(choices)}"
        case "bool_type":
            return f"{shown(value)} is neither true nor false", "write true or false"
        case "tuple_type":
            return f"must be a list, not {shown(value)}", _list_fix(value)
    return detail["msg"], "correct the value"


def _list_fix(value: object) -> str:
    if isinstance(value, str):
        return f"write [{', '.join(part.strip() for part in value.split(','))}]"
    return 'begin each item on a line of its own with "- "'


def _nearest_key(loc: Loc) -> str:
    known = list(_field_by_key(_section(loc[:-1])))
    nearest = difflib.get_close_matches(str(loc[-1]), known, n=1)
    return f"did you mean {nearest[0]}?" if nearest else f"known here: {', '.join(known)}"


def _field_by_key(section: type[Section]) -> dict[str, Any]:
    return {field.alias or name: field for name, field in section.model_fields.items()}


def _section(loc: Loc) -> type[Section]:
    section: type[Section] = Config
    for part in loc:
        if isinstance(part, str):
            section = _section_in(_field_by_key(section)[part].annotation) or section
    return section


def _section_in(annotation: object) -> type[Section] | None:
    """Find the model in an annotation such as `Tls | None` or `tuple[RuleSection, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    found = (_section_in(argument) for argument in get_args(annotation))
    return next((section for section in found if section), None)
