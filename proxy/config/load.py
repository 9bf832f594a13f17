"""From a file to a `Config`, or to the list of everything that is wrong with it."""

import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from proxy.config.checks import find_config_problems
from proxy.config.document import (
    ConfigError,
    ConfigProblem,
    YamlDocument,
    key_path,
    read_document,
)
from proxy.config.models import Config
from proxy.quota.fields import (
    OTHER_PLACE,
    Loc,
    SectionProblem,
    SectionProblemsError,
    fields_of,
    keys_of_section,
)
from proxy.quota.values import BadValueError, shown

_UNKNOWN_KEY: Final = {"extra_forbidden", "unexpected_keyword_argument"}

_NOT_CALLED: Final = "default_factory_not_called"
"""Of a default that depends on a value which is wrong itself."""


def load_config(path: Path) -> Config:
    """Read a file, whose paths start at its directory. Raises ConfigError with all its mistakes.

    What contradicts each other in a section is found when its values are sound, and what does
    between sections when all of them are.
    """
    document = read_document(path)
    problems, unknown = list(document.problems), set[Loc]()
    try:
        config = Config.model_validate(document.data, context=path.parent)
    except ValidationError as error:
        details = error.errors(include_url=False)
        unknown = {detail["loc"] for detail in details if detail["type"] in _UNKNOWN_KEY}
        problems += (each for detail in details for each in _problems(document, detail))
    else:
        if not document.empty:
            problems += (_located(document, (), each) for each in find_config_problems(config))
    problems += (
        document.problem(loc, "has no value", "give it a value or remove it")
        for loc in document.empty
        if not any(loc[: len(start)] == start for start in unknown)
    )
    if problems:
        raise ConfigError(problems)
    config.locate({key_path(loc): f"{path}:{line}" for loc, line in document.lines.items()})
    return config


def _problems(document: YamlDocument, detail: ErrorDetails) -> Iterator[ConfigProblem]:
    """Yield what the author is told of an error of a model."""
    loc, reason = detail["loc"], detail.get("ctx", {}).get("error")
    is_known_key = detail["type"] not in _UNKNOWN_KEY
    # A key without a value, or one that is misread, is one mistake, whatever the model says.
    reported = {problem.key for problem in document.problems}
    if isinstance(reason, SectionProblemsError):
        if not any(empty[: len(loc)] == loc for empty in document.empty):
            yield from (_located(document, loc, each) for each in reason.args)
    elif detail["type"] != _NOT_CALLED and not (
        is_known_key and (loc in document.empty or key_path(loc) in reported)
    ):
        yield document.problem(loc, *_words(detail))


def _located(document: YamlDocument, section: Loc, problem: SectionProblem) -> ConfigProblem:
    other = (*section, *problem.other)
    place = f"{key_path(other)} on line {document.line(other)}"
    message = problem.message.replace(OTHER_PLACE, place)
    return document.problem((*section, *problem.path), message, problem.fix)


def _words(detail: ErrorDetails) -> tuple[str, str]:
    """Return in the user's words what pydantic found, and how to mend it."""
    loc, value = detail["loc"], detail["input"]
    reason = detail.get("ctx", {}).get("error")
    if isinstance(reason, BadValueError):
        return reason.message, reason.fix
    match detail["type"]:
        case "missing":
            field = keys_of_section(_section(loc[:-1]))[str(loc[-1])]
            return "is missing", f"add it, for example: {(field.examples or ['?'])[0]}"
        case kind if kind in _UNKNOWN_KEY:
            known = list(keys_of_section(_section(loc[:-1])))
            nearest = difflib.get_close_matches(str(loc[-1]), known, n=1)
            fix = f"did you mean {nearest[0]}?" if nearest else f"known here: {', '.join(known)}"
            return "is not a known key", fix
        case "model_type" | "dataclass_type":
            keys = ", ".join(keys_of_section(_section(loc)))
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


def _section(loc: Loc) -> object:
    """Return the class of the section at a place, or of the nearest around it."""
    section: object = Config
    for part in loc:
        if isinstance(part, str):
            section = _section_in(keys_of_section(section)[part].annotation) or section
    return section


def _section_in(annotation: object) -> object:
    """Find the section in an annotation such as `Tls | None` or `tuple[RuleSection, ...]`."""
    if fields_of(annotation) is not None:
        return annotation
    found = (_section_in(argument) for argument in get_args(annotation))
    return next((section for section in found if section), None)
