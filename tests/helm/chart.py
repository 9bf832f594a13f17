"""Render the chart, and lay a rendered pod's files out in a directory."""

import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm"
EXAMPLES = {path.stem: path for path in sorted((CHART / "examples").glob("*.yaml"))}
RELEASE, NAMESPACE = "team", "data"

Manifest = dict[str, Any]


class ChartError(Exception):
    """Helm refused; the message is what it printed."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """The objects that one set of values makes."""

    objects: tuple[Manifest, ...]

    def of(self, kind: str) -> list[Manifest]:
        return [item for item in self.objects if item["kind"] == kind]

    def main(self, kind: str) -> Manifest:
        """Return the object of this kind that has the release's full name, the shortest."""
        return min(self.of(kind), key=lambda item: len(item["metadata"]["name"]))

    @property
    def workload(self) -> Manifest:
        (workload,) = self.of("StatefulSet") + self.of("Deployment")
        return workload

    @property
    def pod(self) -> Manifest:
        return self.workload["spec"]["template"]

    @property
    def container(self) -> Manifest:
        (container,) = self.pod["spec"]["containers"]
        return container

    @property
    def config_text(self) -> str:
        return self.main("ConfigMap")["data"]["quota-proxy.yaml"]

    @property
    def config(self) -> Manifest:
        return yaml.safe_load(self.config_text)


@dataclass(frozen=True, slots=True)
class Helm:
    """The helm program, with the chart as its subject."""

    path: Path
    chart: Path = CHART

    def run(self, *arguments: str) -> str:
        done = subprocess.run(
            [self.path, *arguments], capture_output=True, text=True, timeout=60, check=False
        )
        if done.returncode:
            raise ChartError(done.stdout + done.stderr)
        return done.stdout

    def lint(self, *values: Path) -> str:
        return self.run("lint", "--strict", str(self.chart), *_values(values))

    def template(self, *values: Path, sets: Mapping[str, str] | None = None) -> Rendered:
        """Render with files of values, and values set by `--set-json`."""
        extra = [f"--set-json={key}={value}" for key, value in (sets or {}).items()]
        command = ["template", RELEASE, str(self.chart), f"--namespace={NAMESPACE}"]
        text = self.run(*command, *_values(values), *extra)
        return Rendered(tuple(item for item in yaml.load_all(text, yaml.CSafeLoader) if item))


def _values(paths: tuple[Path, ...]) -> list[str]:
    return [f"--values={path}" for path in paths]


def _secrets_of(volume: Manifest) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yield the Secrets in a volume, each with the paths of its keys; without any: all keys."""
    sources = [each["secret"] for each in volume.get("projected", {}).get("sources", ())]
    for secret in [volume["secret"]] if "secret" in volume else sources:
        paths = {item["key"]: item["path"] for item in secret.get("items", ())}
        yield secret.get("secretName") or secret["name"], paths


def lay_out(rendered: Rendered, secrets: Mapping[str, Mapping[str, bytes]], root: Path) -> Path:
    """Make the pod's volumes under `root`, as the kubelet would; return the configuration's path.

    `secrets` are those that the chart does not make itself: name, key, content. Paths in the
    configuration that lie in a mount are led to its place under `root`; others are left, and so
    are found missing.
    """
    volumes = {item["name"]: item for item in rendered.pod["spec"]["volumes"]}
    made = {item["metadata"]["name"]: item["data"] for item in rendered.of("Secret")}
    mounts = rendered.container["volumeMounts"]
    for mount in mounts:
        place = root / mount["mountPath"].lstrip("/")
        place.mkdir(parents=True)
        for name, paths in _secrets_of(volumes.get(mount["name"], {})):
            content = secrets.get(name) or {key: f"token {key}".encode() for key in made[name]}
            for key, data in content.items():
                if not paths or key in paths:
                    file = place / paths.get(key, key)
                    file.parent.mkdir(exist_ok=True)
                    file.write_bytes(data)
    mounted = "|".join(re.escape(mount["mountPath"]) for mount in mounts)
    text = re.sub(rf"(?<=[ '\"])(?={mounted})", str(root), rendered.config_text)
    arguments = rendered.container["args"]
    config = root / arguments[arguments.index("-c") + 1].lstrip("/")
    config.write_text(text)
    return config
