"""What is wrong with a file that an option names is said, with the option and the file."""

from pathlib import Path

import pytest

from proxy.cli import EXIT_FAILED, main

COMMANDS = ("top", "connections", "pause", "resume", "suggest")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("option", ["--ca-file", "--cert-file", "--token-file"])
@pytest.mark.parametrize("content", [None, b"\xff no certificate"])
def test_a_file_that_cannot_be_used_is_named(
    command: str,
    option: str,
    content: bytes | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "file.pem"
    if content is not None:
        path.write_bytes(content)
    assert main([command, option, str(path)]) == EXIT_FAILED
    said = capsys.readouterr().err
    assert said.startswith(f"{option} {path}: ")
    assert "\n    fix: name a file with " in said
