"""Java is found where the user says, and one that can't do is told."""

from pathlib import Path

import pytest

from examples.devkit import JavaError
from examples.devkit.java import find_java


@pytest.mark.parametrize(
    ("version_line", "message"),
    [
        ('openjdk version "17.0.15" 2025-04-15', None),
        ('openjdk version "21" 2023-09-19', None),
        ('Picked up JAVA_TOOL_OPTIONS: -Dx=1\nopenjdk version "17.0.1"', None),
        ('java version "1.8.0_202"', "is Java 8, which is too old"),
        ('openjdk version "11.0.2" 2019-01-15', "is Java 11, which is too old"),
        ("nonsense", "does not tell its version"),
    ],
    ids=["17", "21", "17 with options", "8", "11", "nonsense"],
)
def test_java_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version_line: str, message: str | None
) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{version_line}\nEND\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    if message is None:
        assert find_java() == java
    else:
        with pytest.raises(JavaError, match=message):
            find_java()


def test_no_java_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(JavaError, match="No Java was found on the PATH") as caught:
        find_java()
    assert "Java 17" in caught.value.how


def test_java_home_without_java_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(JavaError, match=r"No Java was found in JAVA_HOME"):
        find_java()
