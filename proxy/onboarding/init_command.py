"""`quota-proxy init`: writes all that a first run needs, and says what to run then."""

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from proxy.config.endpoints import HostPort, parse_advertised_host, parse_endpoint
from proxy.config.fields import TOPIC_NAME
from proxy.onboarding.starter_files import (
    CONFIG_FILE,
    JOB_FILE,
    SPARK_TOKEN_FILE,
    Start,
    starter_files,
    write_files,
)
from proxy.quota.values import BadValueError

EXIT_DONE, EXIT_BAD_INPUT = 0, 2

LISTENER_FILE: Final = Path(__file__).parents[1] / "spark" / "quota_listener.py"
"""What a driver needs where this package is not installed."""

_Value = TypeVar("_Value")


def add_init(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `init`."""
    init = commands.add_parser("init", help="write a configuration, tokens and a Spark job")
    spark_help = "also write job.py, a streaming query of this name, with its rule and token"
    init.add_argument("--spark", type=_name, metavar="NAME", help=spark_help)
    topic_help = "what the query reads (default: the topic NAME)"
    init.add_argument("--topic", type=_name, help=topic_help)
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


def _name(text: str) -> str:
    """Parse the name of a query that a topic, a client id and a group can have, too."""
    if not TOPIC_NAME.fullmatch(text):
        fix = "write letters, digits and characters of ._-"
        raise argparse.ArgumentTypeError(f"{text!r} is no name; fix: {fix}")
    return text


def _init(options: argparse.Namespace) -> int:
    if options.topic is not None and options.spark is None:
        return _refuse("--topic is what a query reads", "name the query: --spark NAME")
    folder: Path = options.dir
    start = Start(options.bootstrap_servers, options.host, options.spark, options.topic)
    files = starter_files(start)
    there = [name for name in files if (folder / name).is_symlink() or (folder / name).exists()]
    if there and not options.force:
        what = f"{folder / there[0]} is there already, and stays as it is"
        return _refuse(what, "give another --dir, or --force to replace it")
    write_files(folder, files, replace=options.force)
    _print_next(folder, start, list(files))
    return EXIT_DONE


def _refuse(what: str, fix: str) -> int:
    sys.stderr.write(f"init: {what}\n    fix: {fix}\n")
    return EXIT_BAD_INPUT


def _print_next(folder: Path, start: Start, names: list[str]) -> None:
    config = shlex.quote(str(folder / CONFIG_FILE))
    lines = [f"wrote {', '.join(str(folder / name) for name in names)}", "", "next:"]
    lines.append(f"  quota-proxy run -c {config}")
    if start.query is not None:
        lines.append(f"  python {shlex.quote(str(folder / JOB_FILE))}")
        lines.append(f"  quota-proxy doctor {start.query} -c {config}")
        lines += [
            "",
            "to run the job on another machine, or with spark-submit --py-files, copy there:",
            f"  {JOB_FILE}, {SPARK_TOKEN_FILE} and {LISTENER_FILE}",
        ]
    if not start.is_local:
        lines += ["", "the admin port is open to others, without TLS: see admin in docs/api.md"]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
