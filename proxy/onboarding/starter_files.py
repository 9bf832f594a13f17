"""The files that `quota-proxy init` writes: a whole configuration, its tokens, and a Spark job.

They go together as they are: the job's addresses, names and token are those of the configuration.
"""

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Final

import yaml

from proxy.config.endpoints import HostPort

CONFIG_FILE: Final = "quota-proxy.yaml"
JOB_FILE: Final = "job.py"
ADMIN_TOKEN_FILE, SPARK_TOKEN_FILE = "admin-token", "spark-token"  # names, no secrets

BOOTSTRAP_PORT, ADMIN_PORT = 19092, 9644
EVERY_INTERFACE: Final = "0.0.0.0"
LOOPBACK: Final = "127.0.0.1"

TOKEN_BYTES = 24
SECRET_MODE = 0o600
PLAIN_MODE = 0o666  # less the umask
_SECRET_FILES: Final = frozenset({ADMIN_TOKEN_FILE, SPARK_TOKEN_FILE})

TEMPLATES: Final = Path(__file__).parent / "templates"

_RULE = Template("""\
    # The query may never read more than this. Below it, its batches fit its trigger.
    - client-id: $name
      consumer_byte_rate: 10MiB
      adaptive: {}
""")
_EXAMPLE_RULE = """\
    - {client-id: etl-orders, consumer_byte_rate: 10MiB, producer_byte_rate: 5MiB}
"""
_QUERIES = Template("""\
# Its lag, and what it has completed, which is committed to this group.
queries:
  - {name: $name, commit_group: $group}
""")
_TOKENS = """\
  tokens:
    - {name: spark, token_file: spark-token, rights: [report]}
"""


@dataclass(frozen=True, slots=True)
class Start:
    """What the files are to say."""

    servers: Sequence[HostPort]
    """Brokers to begin with."""
    host: str = "localhost"
    """How clients reach the proxy. Only this machine does by one that is loopback."""
    query: str | None = None
    """Name of a Spark query to write a job for."""
    topic: str | None = None
    """What it reads; None: the topic of its name."""

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the proxy."""
        return HostPort(self.host, 0).is_loopback


def starter_files(start: Start) -> Mapping[str, str]:
    """Return what to write, by the name of the file; tokens are made anew each time."""
    files = {CONFIG_FILE: _config(start), ADMIN_TOKEN_FILE: _token()}
    if start.query is not None:
        files |= {SPARK_TOKEN_FILE: _token(), JOB_FILE: _job(start, start.query)}
    return files


def write_files(folder: Path, files: Mapping[str, str], *, replace: bool = False) -> None:
    """Write files to a folder, which is made; one with a secret only its owner can read.

    Raises OSError, also where a file is there that is not to be replaced.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        path = folder / name
        if replace:
            path.unlink(missing_ok=True)
        mode = SECRET_MODE if name in _SECRET_FILES else PLAIN_MODE
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(descriptor, "w", encoding="utf-8") as file:  # noqa: PTH123 - one that is open
            file.write(text)


def _config(start: Start) -> str:
    has_query = start.query is not None
    name = _plain(start.query or "")
    return _template(CONFIG_FILE).substitute(
        config_file=CONFIG_FILE,
        servers=", ".join(_plain(str(server)) for server in start.servers),
        host=_plain(start.host),
        bind_host=LOOPBACK if start.is_local else EVERY_INTERFACE,
        bootstrap_port=BOOTSTRAP_PORT,
        admin_port=ADMIN_PORT,
        admin_token_file=ADMIN_TOKEN_FILE,
        report_token=f", reports that in {SPARK_TOKEN_FILE}" if has_query else "",
        rules=_RULE.substitute(name=name) if has_query else _EXAMPLE_RULE,
        queries=_QUERIES.substitute(name=name, group=f"{start.query}-progress") * has_query,
        tokens=_TOKENS * has_query,
    )


def _job(start: Start, query: str) -> str:
    return _template(JOB_FILE).substitute(
        name=query,
        topic=start.topic or query,
        job_file=JOB_FILE,
        spark_token_file=SPARK_TOKEN_FILE,
        admin_url=f"http://{HostPort(start.host, ADMIN_PORT)}",
        bootstrap=HostPort(start.host, BOOTSTRAP_PORT),
    )


def _template(name: str) -> Template:
    return Template((TEMPLATES / f"{name}.template").read_text(encoding="utf-8"))


def _token() -> str:
    return f"{secrets.token_urlsafe(TOKEN_BYTES)}\n"


def _plain(text: str) -> str:
    """Write text for YAML: in quotes where it would be taken for something else."""
    try:
        is_itself = yaml.safe_load(f"[{text}]") == [text]
    except yaml.YAMLError:
        is_itself = False
    return text if is_itself else f'"{text}"'
