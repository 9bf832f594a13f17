"""One name for one concept: what of docs/glossary.md a program can see."""

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULES = sorted(path for room in ("metrics", "proxy") for path in (ROOT / room).rglob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in MODULES}
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
Named = tuple[str, str, str]
"""Of what a module defines at its top: module, name, and what it is, as text."""

DOUBLED = {
    "DRAINING",
    "EXIT_DONE",
    "MAX_AGE_MS",
    "MAX_ERROR_CHARS",
    "MAX_EVENTS",
    "MAX_NUMBER",
    "MAX_PARTITIONS",
    "PREFIX",
    "Partition",
    "REPORT_PATH",  # the listener in a driver imports nothing of ours
    "ROOM_SHARE",
    "Topic",
}
"""Functions, constants and aliases that still share their names: to be renamed, never added to."""

WRITTEN_TWICE = {
    "_log",
}
"""What modules may each have for themselves."""

FEELINGS = ("Go on", "Hear", "Know", "Learn", "Let", "Note", "Say", "Take in", "Take note", "Tell")
"""How docstrings begin that do not say what a function does."""


def definitions() -> Iterator[tuple[str, Definition]]:
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, Definition):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def top_level() -> Iterator[Named]:
    """Yield functions, constants and aliases; a type variable stands for any type, in one place."""
    for path, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names, what = [node.name], ast.dump(node)
            elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                every = (each for target in targets for each in ast.walk(target))
                names = [each.id for each in every if isinstance(each, ast.Name)]
                what = ast.dump(node.value)
                if "TypeVar" in what:
                    continue
            else:
                continue
            yield from ((str(path), name, what) for name in names if name != "__all__")


def doubled(names: Iterable[str]) -> list[str]:
    return [name for name, times in Counter(names).items() if times > 1]


def test_each_module_has_a_name_of_its_own():
    assert doubled(path.stem for path in MODULES if path.stem != "__init__") == []


def test_each_class_has_a_name_of_its_own():
    classes = (node.name for _, node in definitions() if isinstance(node, ast.ClassDef))
    assert doubled(name.lstrip("_") for name in classes) == []


def test_each_function_constant_and_alias_has_a_name_of_its_own():
    public = [name for _, name, _ in top_level() if not name.startswith("_")]
    assert set(doubled(public)) == DOUBLED


def test_private_names_are_used_in_their_module_alone():
    """So two helpers of one name are never taken for each other."""
    taken = [
        (str(path), each.name)
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module != "__future__"
        for each in node.names
        if each.name.startswith("_")
    ]
    assert taken == []


def test_no_private_helper_or_constant_is_written_twice():
    private = [(name, what) for _, name, what in top_level() if name.startswith("_")]
    assert {name for (name, _), times in Counter(private).items() if times > 1} == WRITTEN_TWICE


def test_docstrings_begin_with_the_verb_of_the_effect():
    docstrings = (
        (place, ast.get_docstring(node))
        for place, node in definitions()
        if not isinstance(node, ast.ClassDef)
    )
    assert [
        (place, text)
        for place, text in docstrings
        if text and re.match(rf"({'|'.join(FEELINGS)})\b", text)
    ] == []


def names_in_use() -> set[str]:
    nodes = [node for tree in TREES.values() for node in ast.walk(tree)]
    return {
        *(node.name for node in nodes if isinstance(node, Definition)),
        *(node.id for node in nodes if isinstance(node, ast.Name)),
        *(node.attr for node in nodes if isinstance(node, ast.Attribute)),
        *(str(node.value) for node in nodes if isinstance(node, ast.Constant)),
    }


def test_the_glossary_has_names_that_the_code_has():
    glossary = (ROOT / "docs" / "glossary.md").read_text()
    cells = re.findall(r"^\| \*\*.*\| (.*) \|$", glossary, re.MULTILINE)
    assert cells
    dotted = re.findall("`(.*?)`", " ".join(cells))
    assert {part for name in dotted for part in name.split(".")} - names_in_use() == set()
