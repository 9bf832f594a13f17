"""The systemd unit in the examples: systemd takes it, and its commands do what it says."""

import configparser
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.operating import quota_proxy

UNIT = Path(__file__).parents[2] / "examples" / "quota-proxy.service"
COMMAND = Path(sys.executable).with_name("quota-proxy")
INSTALLED = "/opt/quota-proxy/bin/quota-proxy"


@pytest.fixture
def service() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNIT)
    return parser["Service"]


def test_systemd_finds_nothing_to_say(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd here")
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace(INSTALLED, str(COMMAND)))
    done = subprocess.run(
        ["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False
    )
    said = [line for line in done.stderr.splitlines() if UNIT.name in line]
    assert said == []
    wrong = unit.read_text().replace("RestartPreventExitStatus", "RestartPrevent")
    unit.write_text(wrong)
    done = subprocess.run(
        ["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False
    )
    assert "RestartPrevent" in done.stderr, "it would say so"


def test_a_mistake_in_the_configuration_ends_with_the_code_that_is_not_tried_again(
    service: configparser.SectionProxy, tmp_path: Path
) -> None:
    file = tmp_path / "quota-proxy.yaml"
    file.write_text("cluster: [\n")
    for key in ("ExecStartPre", "ExecStart"):
        program, *arguments = shlex.split(service[key])
        assert program == INSTALLED
        config = arguments[arguments.index("-c") + 1]
        code, _, _ = quota_proxy(*(file if each == config else each for each in arguments))
        assert code == int(service["RestartPreventExitStatus"])


def test_what_init_writes_runs_with_the_path_of_the_state_that_it_names(
    service: configparser.SectionProxy, tmp_path: Path
) -> None:
    path = f"/var/lib/{service['StateDirectory']}/quota-proxy.db"
    assert f"state.path: {path}" in UNIT.read_text()
    assert quota_proxy("init", "--dir", tmp_path)[0] == 0
    file = tmp_path / "quota-proxy.yaml"
    text, changed = re.subn(r"path: quota-proxy.db", f"path: {tmp_path}/q.db", file.read_text())
    file.write_text(text)
    assert changed == 1
    assert quota_proxy("check", "-c", file)[0] == 0
