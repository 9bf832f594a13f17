"""`quota-proxy init`: writes all that a first run needs, and says what to run then.

The files go together as they are: the job's addresses, names and token are those of the
configuration.
"""

import argparse
import secrets
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from string import Template
from tempfile import TemporaryDirectory
from typing import Final, TypeVar

from proxy.config.document import quote_for_yaml
from proxy.config.endpoints import HostPort, parse_advertised_host, parse_endpoint
from proxy.quota.validation import TOPIC_NAME
from proxy.quota.values import BadValueError

CONFIG_FILE: Final = "quota-proxy.yaml"
JOB_FILE: Final = "job.py"
ADMIN_TOKEN_FILE, SPARK_TOKEN_FILE = "admin-token", "spark-token"  # names, no secrets
BOOTSTRAP_PORT, ADMIN_PORT = 19092, 9644
EVERY_INTERFACE: Final = "0.0.0.0"
LOOPBACK: Final = "127.0.0.1"

TOKEN_BYTES = 24
SECRET_MODE = 0o600
PLAIN_MODE = 0o666  # less the umask

TEMPLATES: Final = Path(__file__).parent / "templates"

LISTENER_FILE: Final = Path(__file__).parents[1] / "spark" / "quota_listener.py"
"""What a driver needs where this package is not installed."""

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

_Value = TypeVar("_Value")


def add_init(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `init`."""
    init = commands.add_parser("init", help="write a configuration, tokens and a Spark job")
    spark_help = "also write job.py, a streaming query of this name, with its rule and token"
    init.add_argument("--spark", type=parse_topic_name, metavar="NAME", help=spark_help)
    topic_help = "what the query reads (default: the topic NAME)"
    init.add_argument("--topic", type=parse_topic_name, help=topic_help)
    servers_help = "brokers to begin with, HOST:PORT,... (default: localhost:9092)"
    init.add_argument(
        "--bootstrap-servers", type=_servers, default="localhost:9092", help=servers_help
    )
    host_help = "how clients reach the proxy (default: localhost, from this machine only)"
    init.add_argument(
        "--host", type=_parsed_by(parse_advertised_host), default="localhost", help=host_help
    )
    init.add_argument("--dir", type=Path, default=Path(), help="where to (default: here)")
    init.add_argument("--force", action="store_true", help="replace files that are there")
    init.set_defaults(command=_init)


def _parsed_by(parse: Callable[[object], _Value]) -> Callable[[str], _Value]:
    """Return what parses an option as a value of the configuration."""

    def parsed(text: str) -> _Value:
        try:
            return parse(text)
        except BadValueError as error:
            raise argparse.ArgumentTypeError(f"{error.message}; fix: {error.fix}") from None

    return parsed


def _servers(text: str) -> list[HostPort]:
    return [_parsed_by(parse_endpoint)(server) for server in text.split(",")]


def parse_topic_name(text: str) -> str:
    """Parse the name of a query that a topic, a client id and a group can have, too."""
    if not TOPIC_NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no name; fix: use letters, digits and ._-")
    return text


def _init(options: argparse.Namespace) -> None:
    query: str | None = options.spark
    folder: Path = options.dir
    if options.topic is not None and query is None:
        raise BadValueError("init: --topic is what a query reads", "name the query: --spark NAME")
    is_local = HostPort(options.host, 0).is_loopback
    files = {CONFIG_FILE: _config(options, is_local=is_local), ADMIN_TOKEN_FILE: _token()}
    if query is not None:
        files |= {SPARK_TOKEN_FILE: _token(), JOB_FILE: _job(options)}
    there = [name for name in files if (folder / name).is_symlink() or (folder / name).exists()]
    if there and not options.force:
        what = f"init: {folder / there[0]} is there already, and stays as it is"
        raise BadValueError(what, "give another --dir, or --force to replace it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise BadValueError(f"init: {error.filename} is no folder", "give another --dir") from None
    _write(folder, files)
    config = shlex.quote(str(folder / CONFIG_FILE))
    lines = [f"wrote {', '.join(str(folder / name) for name in files)}", "", "next:"]
    lines.append(f"  quota-proxy run -c {config}")
    if query is not None:
        lines += [
            f"  python {shlex.quote(str(folder / JOB_FILE))}",
            f"  quota-proxy doctor {query} -c {config}",
            "",
            "to run the job on another machine, or with spark-submit --py-files, copy there:",
            f"  {JOB_FILE}, {SPARK_TOKEN_FILE} and {LISTENER_FILE}",
        ]
    if not is_local:
        lines += ["", "the admin port is open to others, without TLS: see admin in docs/api.md"]
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def _write(folder: Path, files: Mapping[str, str]) -> None:
    """Write files to a folder; one with a secret only its owner can read.

    None is put in its place before all could be written, as where a disk is full. Raises OSError.
    """
    with TemporaryDirectory(dir=folder) as made:
        for name, text in files.items():
            mode = SECRET_MODE if name in (ADMIN_TOKEN_FILE, SPARK_TOKEN_FILE) else PLAIN_MODE
            Path(made, name).touch(mode, exist_ok=False)
            Path(made, name).write_text(text, encoding="utf-8")
        for name in files:
            Path(made, name).replace(folder / name)


def _config(options: argparse.Namespace, *, is_local: bool) -> str:
    query, has_query = options.spark, options.spark is not None
    name = quote_for_yaml(query or "")
    return _template(CONFIG_FILE).substitute(
        servers=", ".join(quote_for_yaml(str(server)) for server in options.bootstrap_servers),
        host=quote_for_yaml(options.host),
        bind_host=LOOPBACK if is_local else EVERY_INTERFACE,
        bootstrap_port=BOOTSTRAP_PORT,
        admin_port=ADMIN_PORT,
        report_token=f", reports that in {SPARK_TOKEN_FILE}" if has_query else "",
        rules=_RULE.substitute(name=name) if has_query else _EXAMPLE_RULE,
        queries=_QUERIES.substitute(name=name, group=f"{query}-progress") * has_query,
        tokens=_TOKENS * has_query,
    )


def _job(options: argparse.Namespace) -> str:
    return _template(JOB_FILE).substitute(
        name=options.spark,
        topic=options.topic or options.spark,
        admin_url=f"http://{HostPort(options.host, ADMIN_PORT)}",
        bootstrap=HostPort(options.host, BOOTSTRAP_PORT),
    )


def _template(name: str) -> Template:
    return Template((TEMPLATES / f"{name}.template").read_text(encoding="utf-8"))


def _token() -> str:
    return f"{secrets.token_urlsafe(TOKEN_BYTES)}\n"
