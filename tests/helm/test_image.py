"""What goes into the container image: all that the product needs, as the chart expects it."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml
from chart import ROOT, Helm

PACKAGES = ("proxy", "metrics")
CHART_VERSION = yaml.safe_load((ROOT / "helm" / "Chart.yaml").read_text())["appVersion"]
DIGEST = "sha256:" + "0123456789abcdef" * 4
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def test_the_wheel_carries_every_file_of_the_packages(tmp_path: Path) -> None:
    source = tmp_path / "source"
    left_out = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=left_out)
    wanted = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps"),
            *("--no-build-isolation", "--wheel-dir", tmp_path, source),
        ],
        check=True,
        timeout=120,
    )
    (wheel,) = tmp_path.glob("*.whl")
    carried = set(zipfile.ZipFile(wheel).namelist())
    assert wanted - carried == set()
    assert {"proxy/py.typed", "metrics/py.typed"} <= carried
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in carried)


def test_everything_that_is_copied_passes_dockerignore() -> None:
    copied = [
        source
        for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE)
        for source in line.split()[:-1]
    ]
    kept = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert sorted(copied) == sorted(kept)


@pytest.mark.parametrize(
    ("sets", "image"),
    [
        ({}, f"r.example/p:{CHART_VERSION}"),
        ({"image.tag": '"1.2"'}, "r.example/p:1.2"),
        ({"image.digest": f'"{DIGEST}"', "image.tag": '"1.2"'}, f"r.example/p@{DIGEST}"),
    ],
    ids=["of this version", "by tag", "by digest"],
)
def test_the_image_is_the_one_that_is_named(helm: Helm, sets: dict[str, str], image: str) -> None:
    made = helm.template(sets={"image.repository": '"r.example/p"', **sets})
    assert made.pod["spec"]["containers"][0]["image"] == image


def test_the_chart_runs_the_image_as_it_was_made_to(helm: Helm) -> None:
    made = helm.template()
    user = made.pod["spec"]["securityContext"]
    assert f"USER {user['runAsUser']}:{user['runAsGroup']}" in DOCKERFILE
    assert 'ENTRYPOINT ["quota-proxy"]' in DOCKERFILE
    state = Path(made.config["state"]["path"]).parent
    assert f"WORKDIR {state}" in DOCKERFILE
