"""One name for one concept: what of docs/glossary.md a program can see."""

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULES = sorted(path for room in ("metrics", "proxy") for path in (ROOT / room).rglob("*.py"))
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
FEELINGS = ("Go on", "Hear", "Know", "Learn", "Let", "Note", "Say", "Take in", "Take note", "Tell")
"""How docstrings begin that do not say what a function does."""


def definitions() -> Iterator[tuple[str, Definition]]:
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, Definition):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def doubled(names: Iterable[str]) -> list[str]:
    return [name for name, times in Counter(names).items() if times > 1]


def test_each_module_has_a_name_of_its_own():
    assert doubled(path.stem for path in MODULES if path.stem != "__init__") == []


def test_each_class_has_a_name_of_its_own():
    classes = (node.name for _, node in definitions() if isinstance(node, ast.ClassDef))
    assert doubled(name.lstrip("_") for name in classes) == []


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
