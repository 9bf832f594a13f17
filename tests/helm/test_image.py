"""What goes into the container image: all that the product needs, as the chart expects it."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from chart import ROOT, Helm

PACKAGES = ("proxy", "metrics")
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def test_the_wheel_carries_every_file_of_the_packages(tmp_path: Path) -> None:
    source = tmp_path / "source"
    left_out = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=left_out)
    wanted = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    for name in ("pyproject.toml", "README.md"):
        if (ROOT / name).exists():
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
    assert wanted - set(zipfile.ZipFile(wheel).namelist()) == set()


def test_everything_that_is_copied_passes_dockerignore() -> None:
    copied = [
        source
        for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE)
        for source in line.split()[:-1]
    ]
    kept = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert sorted(copied) == sorted(kept)


def test_the_chart_runs_the_image_as_it_was_made_to(helm: Helm) -> None:
    made = helm.template()
    user = made.pod["spec"]["securityContext"]
    assert f"USER {user['runAsUser']}:{user['runAsGroup']}" in DOCKERFILE
    assert 'ENTRYPOINT ["quota-proxy"]' in DOCKERFILE
    state = Path(made.config["state"]["path"]).parent
    assert f"WORKDIR {state}" in DOCKERFILE
