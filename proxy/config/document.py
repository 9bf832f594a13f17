"""A YAML file as plain values, with the line of every key, and the mistakes that are in it."""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Final

import yaml
from yaml._yaml import CParser
from yaml.composer import Composer
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

from proxy.config.files import read_bytes
from proxy.errors import ProxyError
from proxy.quota.fields import Loc
from proxy.quota.values import BadValueError, shown

MAX_REPEATED_VALUES = 100_000
"""Values that aliases may stand for, all of them together. Few bytes can name billions."""

WHOLE_FILE = 0
"""The line number of a problem that concerns the file and no line of it."""


def quote_for_yaml(text: str) -> str:
    """Write text for YAML: in quotes where it would be taken for something else."""
    try:
        is_itself = yaml.safe_load(f"[{text}]") == [text]
    except yaml.YAMLError:
        is_itself = False
    return text if is_itself else json.dumps(text, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """One mistake in a configuration file, which is given as its user named it."""

    file: str
    line: int
    """Counted from 1, or `WHOLE_FILE`."""
    key: str
    """The path of the key, such as `quotas.rules[2].user`; empty for the whole document."""
    message: str
    fix: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        subject = f"{self.key}: " if self.key else ""
        return f"{place}: {subject}{self.message}\n    fix: {self.fix}"


class ConfigError(ProxyError):
    """A configuration file that cannot be used, with every mistake in line order."""

    is_bad_input = True

    def __init__(self, problems: Iterable[ConfigProblem]) -> None:
        self.problems = tuple(sorted(problems, key=lambda problem: problem.line))
        super().__init__("\n".join(str(problem) for problem in self.problems))


def key_path(loc: Loc) -> str:
    """Write a place as users do: `("quotas", "rules", 2, "user")` is `quotas.rules[2].user`."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
    return "".join(parts).removeprefix(".")


_TIMESTAMP: Final = "tag:yaml.org,2002:timestamp"
_COLLECTION_TAGS: Final = {"tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"}
_YAML_FIX: Final = "check the indentation, brackets and quotes on this line and the one before"
_YAML_FIXES: Final = {
    "'\\t' that cannot start": "use spaces, YAML does not allow tabs here",
    "that cannot start": "put text that begins with this character in quotes",
    "mapping values are not allowed": 'put text that contains ": " in quotes',
    "undefined alias": "define the anchor (&name) before its use (*name)",
    "expected a single document": 'remove the line "---" and what follows it',
    "could not determine a constructor": "remove the word that begins with !",
    "half a character": "write the character itself, or all of it: \\U0001F600",
}
"""How to mend what PyYAML complains of, by a piece of its message; the first that fits."""


_LEADING_ZERO: Final = re.compile(r"0[0-7_]+")


@dataclass(slots=True)
class YamlDocument:
    """What a YAML file says."""

    file: str
    """As its user named it."""
    data: dict[str, object] = field(default_factory=dict)
    """Dicts with text keys, lists, and scalars."""
    lines: dict[Loc, int] = field(default_factory=dict)
    """The line, from 1, of every key and list item; `()` is the document itself."""
    empty: list[Loc] = field(default_factory=list)
    """The keys and list items that have no value."""
    problems: list[ConfigProblem] = field(default_factory=list)
    """Mistakes that did not keep the rest from being read."""

    def line(self, loc: Loc) -> int:
        """Return the line of a key, or of the nearest thing around it that is in the file."""
        while loc not in self.lines:
            loc = loc[:-1]
        return self.lines[loc]

    def problem(self, loc: Loc, message: str, fix: str) -> ConfigProblem:
        """Make the problem of the value at `loc`."""
        return ConfigProblem(self.file, self.line(loc), key_path(loc), message, fix)


class _DocumentReader(Composer, SafeConstructor, Resolver):
    """Makes plain values of nodes, but a date stays text: as a client id that is what it is."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, pattern) for tag, pattern in resolvers if tag != _TIMESTAMP]
        for first, resolvers in Resolver.yaml_implicit_resolvers.items()
    }

    dispose: Callable[[], None]
    """Of the parser."""

    def read(self, file: str) -> YamlDocument:
        """Return what the text says. Raises ConfigError, YAMLError or RecursionError."""
        self._document = document = YamlDocument(file)
        self._built, self._repeated = set[yaml.Node](), 0
        try:
            root = self.get_single_node()
            if root is None:
                fix = "write at least the sections cluster and listeners; see examples/minimal.yaml"
                raise _unusable(file, WHOLE_FILE, "is empty", fix)
            data = self._build(root, ())
            self._free(root)
        finally:
            self.dispose()
        if not isinstance(data, dict):
            message = f"must be a mapping of sections at the top, not {shown(data)}"
            fix = 'begin with a section such as "cluster:"'
            raise _unusable(file, document.line(()), message, fix)
        document.data = data
        return document

    def _free(self, root: yaml.Node) -> None:
        """Free the nodes one by one: no other thread runs while thousands are freed at once."""
        self._built.clear()
        while self.constructed_objects:
            self.constructed_objects.popitem()
        nodes = [root]
        while nodes:
            node = nodes.pop()
            if isinstance(node, yaml.CollectionNode):
                inner, node.value = node.value, []
                nodes += chain.from_iterable(inner) if isinstance(node, yaml.MappingNode) else inner

    def _build(self, node: yaml.Node, loc: Loc) -> object:
        """Turn a node into plain values and note the lines of what it holds."""
        document = self._document
        document.lines.setdefault(loc, node.start_mark.line + 1)
        self._repeated += node in self._built
        self._built.add(node)
        if self._repeated > MAX_REPEATED_VALUES:
            message = f"aliases (*name) stand for more than {MAX_REPEATED_VALUES} values"
            raise ConfigError([document.problem(loc, message, "write out what is meant")])
        if not isinstance(node, yaml.ScalarNode) and node.tag not in _COLLECTION_TAGS:
            fix = "remove the word that begins with !"
            document.problems.append(document.problem(loc, f"has the tag {shown(node.tag)}", fix))
        if isinstance(node, yaml.MappingNode):
            return self._build_mapping(node, loc)
        if isinstance(node, yaml.SequenceNode):
            return [self._build(item, (*loc, index)) for index, item in enumerate(node.value)]
        try:
            value: object = self.construct_object(node)
        except (ValueError, LookupError, AttributeError):
            # What PyYAML itself fails over, for instance with `!!int x` or `!!bool x`.
            problem = f"{shown(node.value)} does not fit its type", "correct it or put it in quotes"
            raise ConfigError([document.problem(loc, *problem)]) from None
        if value is None and loc:
            document.empty.append(loc)
        is_plain = isinstance(node, yaml.ScalarNode) and not node.style
        if is_plain and (misread := _misread(node.value, value)):
            document.problems.append(document.problem(loc, *misread))
        return value

    def _build_mapping(self, node: yaml.MappingNode, loc: Loc) -> dict[str, object]:
        document, mapping = self._document, dict[str, object]()
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            # The text as written: `on` and `1` are keys like any other.
            key = key_node.value
            key_loc = (*loc, key)
            if not isinstance(key_node, yaml.ScalarNode):
                key_loc = loc
                problem = "has a list or a mapping as a key", "write a word, a colon and a space"
            elif key in mapping:
                first = document.line(key_loc)
                problem = f"is there twice, first on line {first}", "remove one of the two"
            else:
                document.lines[key_loc] = line
                mapping[key] = self._build(value_node, key_loc)
                continue
            place = document.file, line, key_path(key_loc)
            document.problems.append(ConfigProblem(*place, *problem))
        return mapping


class _Loader(_DocumentReader, CParser):
    """Parses with libyaml, in an eighth of the time, and puts the nodes together in Python.

    libyaml's own composer would keep other threads from running until the whole file is read.
    """

    def __init__(self, text: str) -> None:
        CParser.__init__(self, text)
        Composer.__init__(self)
        SafeConstructor.__init__(self)
        Resolver.__init__(self)


class _SlowLoader(_DocumentReader, yaml.SafeLoader):
    """Parses in Python, which says better what is wrong with a file."""

    def compose_scalar_node(self, anchor: dict[str, yaml.Node]) -> yaml.ScalarNode:
        """Refuse half a character, a surrogate, as libyaml does: no client could send it."""
        node = super().compose_scalar_node(anchor)
        if any("\ud800" <= char <= "\udfff" for char in node.value):
            raise yaml.composer.ComposerError(None, None, "found half a character", node.start_mark)
        return node


def read_document(path: Path) -> YamlDocument:
    """Read a YAML file in UTF-8 whose top is a mapping. Raises ConfigError for any other."""
    file = str(path)
    try:
        content = read_bytes(path)
    except BadValueError as error:
        raise _unusable(file, WHOLE_FILE, error.message, error.fix) from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        message = f"is not UTF-8: byte 0x{content[error.start]:02x}"
        raise _unusable(file, line, message, "save the file as UTF-8") from None
    try:
        try:
            return _Loader(text).read(file)
        except yaml.YAMLError:
            return _SlowLoader(text).read(file)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        message = f"holds the control character U+{ord(text[error.position]):04X}"
        raise _unusable(file, line, message, "remove it") from None
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(file, error) from None
    except RecursionError:
        message = "nests too deeply, or an alias (*name) contains itself"
        raise _unusable(file, WHOLE_FILE, message, "write it flatter") from None


def _misread(text: str, value: object) -> tuple[str, str] | None:
    """Return what is wrong with a number that YAML reads otherwise than people, and the fix."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    in_quotes = f'or put text in quotes: "{text}"'
    if ":" in text:
        how, fix = "counts sixties", f"write {value:g}, or a duration with its unit: {value:g}s"
    elif _LEADING_ZERO.fullmatch(text) and int(text.replace("_", "")) != value:
        how, fix = "takes a leading 0 for base 8", f"write {text.lstrip('0')}, or {value}"
    else:
        return None
    return f"{text} is {value:g} in YAML, which {how}", f"{fix}; {in_quotes}"


def _unusable(file: str, line: int, message: str, fix: str) -> ConfigError:
    return ConfigError([ConfigProblem(file, line, "", message, fix)])


def _syntax_error(file: str, error: yaml.MarkedYAMLError) -> ConfigError:
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line + 1, mark.column + 1) if mark else (WHOLE_FILE, 1)
    begun = error.context_mark
    context = error.context or ""
    if context and begun and begun.line + 1 != line:
        context += f" begun on line {begun.line + 1}"
    said = ", ".join(filter(None, (context, error.problem)))
    fix = next((fix for piece, fix in _YAML_FIXES.items() if piece in said), _YAML_FIX)
    return _unusable(file, line, f"is not valid YAML at column {column}: {said}", fix)
