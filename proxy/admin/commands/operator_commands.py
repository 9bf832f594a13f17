"""The commands for operators of a running proxy: they ask its admin server."""

import argparse
import getpass
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from proxy.admin.commands.admin_client import DEFAULT_URL, AdminAddress, AdminRefusal
from proxy.quota.validation import RULE_KEYS

MAX_CONNECTIONS_SHOWN = 1000


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `top`, `connections`, `tier`, `pause`, `resume` and `suggest`."""
    asked = asking_options(DEFAULT_URL)

    top = commands.add_parser("top", parents=[asked], help="watch a running proxy in the terminal")
    top.add_argument("--once", action="store_true", help="print once and end")
    top.set_defaults(command=_top)

    connections = commands.add_parser(
        "connections", parents=[asked], help="list who is connected to a proxy"
    )
    text_help = "only those with this in their client id, user, address or listener"
    connections.add_argument("--filter", default="", metavar="TEXT", help=text_help)
    most = number_of(f"a number from 1 to {MAX_CONNECTIONS_SHOWN}", 1, MAX_CONNECTIONS_SHOWN)
    connections.add_argument("--limit", type=most, default=100, help="how many (default: 100)")
    connections.set_defaults(command=_connections)

    tier = commands.add_parser("tier", parents=[asked], help="list who owns what in a tier")
    json_help = "print what is known as JSON, with each member's slots"
    tier.add_argument("--json", action="store_true", dest="as_json", help=json_help)
    tier.set_defaults(command=_tier)

    chosen = argparse.ArgumentParser(add_help=False)
    for key in RULE_KEYS:
        chosen.add_argument(f"--{key}", dest=key, help=f"only clients with this {key}")
    chosen.add_argument("--by", default=_login_name(), help="who does it; shown and logged")
    pause_help = "let clients through for a time: they are measured and held for nothing"
    pause = commands.add_parser("pause", parents=[asked, chosen], help=pause_help)
    for_help = "how long, or until when (default: 30m)"
    pause.add_argument("--for", dest="how_long", default="30m", metavar="TIME", help=for_help)
    pause.set_defaults(command=_pause)
    resume_help = "hold clients to their quotas again"
    resume = commands.add_parser("resume", parents=[asked, chosen], help=resume_help)
    resume.set_defaults(command=_resume)

    suggest_help = "print rules that would fit what was observed, as YAML"
    suggest = commands.add_parser("suggest", parents=[asked], help=suggest_help)
    since_help = "how far to look back, up to 168h (default: 24h)"
    suggest.add_argument("--since", default="24h", metavar="TIME", help=since_help)
    suggest.set_defaults(command=_suggest)


def asking_options(
    url: str | None, token_help: str = "a token of admin.tokens, or that of admin.token_file"
) -> argparse.ArgumentParser:
    """Return the options that say where the proxy's admin port is, and what it wants to see."""
    asked = argparse.ArgumentParser(add_help=False)
    asked.add_argument("--url", default=url, help="the proxy's admin address")
    asked.add_argument("--ca-file", type=Path, help="who may sign its certificate, with https")
    cert_help = "certificate and key to show, where admin.tls.ca_file asks for one"
    asked.add_argument("--cert-file", type=Path, help=cert_help)
    asked.add_argument("--token-file", type=Path, help=token_help)
    return asked


def number_of(what: str, low: int, high: float) -> Callable[[str], int]:
    """Return what parses such a number: `what` says which, for people."""

    def parse(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return int(text)

    return parse


def _login_name() -> str | None:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name
        return None


def admin_address(options: argparse.Namespace) -> AdminAddress:
    """Return what these options name. Raises AdminRefusal for a file that is of no use."""
    tls, token = ssl.create_default_context(), None
    if options.ca_file is not None:
        with _used_as("--ca-file", options.ca_file, "certificates of authorities, as PEM"):
            tls = ssl.create_default_context(cafile=options.ca_file)
    if options.cert_file is not None:
        with _used_as("--cert-file", options.cert_file, "a certificate and its key, as PEM"):
            tls.load_cert_chain(options.cert_file)
    if options.token_file is not None:
        with _used_as("--token-file", options.token_file, "the text of a token"):
            token = _token(options.token_file)
    return AdminAddress(options.url, tls, token)


def _token(path: Path) -> str:
    text = path.read_text().strip()
    if not text or not text.isprintable():  # what it holds is not for a terminal, nor is a header
        raise ValueError("holds no token, which is one line of text")
    return text


@contextmanager
def _used_as(option: str, path: Path, what: str) -> Iterator[None]:
    """Turn what fails about a file that an option names into an AdminRefusal."""
    try:
        yield
    except UnicodeError:
        problem = "is not text"
    except (OSError, ValueError) as error:  # TLS raises the one or the other
        problem = getattr(error, "strerror", None) or str(error)
    else:
        return
    fix = f"name a file with {what}"
    raise AdminRefusal(f"{option} {path}: {problem}", fix, is_bad_input=True)


def _selected(options: argparse.Namespace) -> dict[str, str]:
    """Return the keys of the clients that a command is for."""
    given = ((key, getattr(options, key)) for key in RULE_KEYS)
    return {key: value for key, value in given if value is not None}


# What each needs is imported by itself: `run` needs none of it.


def _top(options: argparse.Namespace) -> None:
    from proxy.admin.commands.top import run_top  # noqa: PLC0415

    run_top(admin_address(options), once=options.once)


def _connections(options: argparse.Namespace) -> None:
    from proxy.admin.commands.connection_table import run_connections  # noqa: PLC0415

    run_connections(admin_address(options), options.filter, options.limit)


def _tier(options: argparse.Namespace) -> None:
    from proxy.admin.commands.tier_table import run_tier  # noqa: PLC0415

    run_tier(admin_address(options), as_json=options.as_json)


def _pause(options: argparse.Namespace) -> None:
    from proxy.admin.commands.throttling_command import run_pause  # noqa: PLC0415

    run_pause(admin_address(options), _selected(options), options.how_long, options.by)


def _resume(options: argparse.Namespace) -> None:
    from proxy.admin.commands.throttling_command import run_resume  # noqa: PLC0415

    run_resume(admin_address(options), _selected(options), options.by)


def _suggest(options: argparse.Namespace) -> None:
    from proxy.admin.commands.suggest_command import run_suggest  # noqa: PLC0415

    run_suggest(admin_address(options), options.since)
