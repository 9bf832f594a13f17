"""One version: that of pyproject.toml, which moves with the changelog and shows everywhere."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from proxy.cli import main
from proxy.release import VERSION

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_version_is_the_newest_heading_of_the_changelog() -> None:
    headings = re.findall(r"^## (\S+)", (ROOT / "docs" / "changelog.md").read_text(), re.MULTILINE)
    assert headings[0] == PROJECT["version"]


def test_what_is_installed_is_of_this_version() -> None:
    assert PROJECT["version"] == VERSION, "the installed package is of another one: `make setup`"


def test_the_chart_installs_this_version() -> None:
    chart = yaml.safe_load((ROOT / "helm" / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (PROJECT["version"], PROJECT["version"])


def test_the_command_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"quota-proxy {VERSION}\n")


def test_the_license_is_the_one_that_is_named() -> None:
    assert PROJECT["license"] == "Apache-2.0"
    (name,) = PROJECT["license-files"]
    text = (ROOT / name).read_text()
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
