"""The commands for operators of a running proxy, and how they ask its admin server."""

import argparse
import asyncio
import getpass
import json
import ssl
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from importlib import import_module
from pathlib import Path
from time import monotonic
from urllib.parse import urlsplit

from proxy.admin.document_models import MISREAD, printable
from proxy.errors import ProxyError
from proxy.quota.validation import CLIENT_KEYS
from proxy.state import Document
from proxy.tier.peer_client import PeerClient, PeerError, Reply, Target

PAGE_ROWS = 1_000  # as many as an answer may have
MAX_REPLY_BYTES = 256 << 20  # of any path: the metrics of 10,000 clients have a tenth of it
MAX_TOKEN_CHARS = 16 << 10
WALK_LIMIT_S = 60.0  # for all pages of a list, which have MAX_REPLY_BYTES together at most
DEFAULT_URL = "http://127.0.0.1:9644"
_FIX_URL = "give the address of admin.bind as --url"


class AdminClientError(ProxyError):
    """The admin server did not answer, or did not do what it was asked for: why, and the fix.

    Both may be what some server says, and are made fit for a terminal.
    """

    def __init__(self, problem: str, fix: str, *, is_bad_input: bool = False) -> None:
        super().__init__(printable(problem), printable(fix))
        self.is_bad_input = is_bad_input


@dataclass(frozen=True, slots=True)
class AdminPortClient:
    """Where a proxy's admin server is, and what it wants to see."""

    url: str
    """Such as `http://127.0.0.1:9644`."""
    tls: ssl.SSLContext | None = None
    """None: the system's authorities sign its certificate, and it wants none of ours."""
    token: str | None = field(default=None, repr=False)
    timeout_s: float = 30.0
    """To connect, and then for an answer as a whole, however slowly it trickles."""

    def ask(
        self,
        path: str,
        body: Mapping[str, object] | None = None,
        content_type: str = "application/json",
    ) -> Reply:
        """Return what a path answers: `GET`, or `POST` with a body. Raises AdminClientError."""
        try:
            parts = urlsplit(self.url)
            is_known = parts.scheme in ("http", "https") and parts.port != 0  # one too high raises
            if not is_known or [self.url] != self.url.split():
                raise ValueError("it is not a URL such as http://127.0.0.1:9644")
            return asyncio.run(self._answer(path, body, content_type))
        except PeerError as error:
            if not error.was_sent:
                fix = f"start the proxy, or {_FIX_URL}"
                raise AdminClientError(f"{self.url} does not answer: {error.why}", fix) from None
            why, is_bad_url = error.why, False
        except TimeoutError:
            why, is_bad_url = f"its answer is not over after {self.timeout_s:g} s", False
        except ValueError as error:
            why, is_bad_url = str(error), True
        problem = f"{self.url!r} does not answer as a proxy would: {why}"
        raise AdminClientError(problem, _FIX_URL, is_bad_input=is_bad_url)

    async def _answer(
        self, path: str, body: Mapping[str, object] | None, content_type: str
    ) -> Reply:
        client = PeerClient(self.token, self.tls, MAX_REPLY_BYTES)
        data = None if body is None else json.dumps(body).encode()
        method, headers = "GET" if data is None else "POST", {"Content-Type": content_type}
        try:
            async with asyncio.timeout(self.timeout_s):
                return await client.send(Target("", self.url), method, path, headers, data)
        finally:
            await client.close()

    def read(self, path: str, body: Mapping[str, object] | None = None) -> bytes:
        """Return the body of an answer. Raises AdminClientError, also for what is refused."""
        reply = self.ask(path, body)
        if reply.status == HTTPStatus.OK:
            return reply.body
        what, fix = reply_error_and_fix(reply)
        if reply.status == HTTPStatus.UNAUTHORIZED:
            fix += "; give its file as --token-file"
        problem = f"{self.url} refuses with {reply.status}: {what}"
        is_bad_input = reply.status == HTTPStatus.BAD_REQUEST
        raise AdminClientError(problem, fix, is_bad_input=is_bad_input)

    def document(
        self,
        path: str,
        known: Set[str] = frozenset(),
        body: Mapping[str, object] | None = None,
    ) -> Document:
        """Return the JSON object that a path answers with, which has these keys. As `read`."""
        return self._object(self.read(path, body), known)

    def _object(self, answer: bytes, known: Set[str]) -> Document:
        try:
            document = json.loads(answer)
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict) or not known <= document.keys():
            raise self.no_proxy()
        return document

    def no_proxy(self) -> AdminClientError:
        """Return what to raise when an answer is none that a proxy gives."""
        return AdminClientError(f"{self.url} is not a quota proxy of this version", _FIX_URL)

    def rows(self, path: str, key: str) -> list[Document]:
        """Return all rows of a list, page by page. As `read`."""
        rows: list[Document] = []
        cursor: str | None = ""
        size, end_s = 0, monotonic() + WALK_LIMIT_S
        while cursor is not None:
            answer = self.read(f"{path}?limit={PAGE_ROWS}&cursor={cursor}")
            size += len(answer)
            if size > MAX_REPLY_BYTES or monotonic() > end_s:
                raise AdminClientError(f"{self.url}: {path} does not end", _FIX_URL)
            page = self._object(answer, {key})
            rows += page[key]
            cursor = page.get("next")
        return rows


def reply_error_and_fix(reply: Reply) -> tuple[str, str]:
    """Return why the proxy refused a request, and the fix."""
    try:
        said = json.loads(reply.body)
        return str(said["error"]), str(said["fix"])
    except MISREAD:
        return reply.reason, "see that it is a quota proxy of this version"


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `top`, `connections`, `tier`, `pause`, `resume` and `suggest`."""
    asked = asking_options(DEFAULT_URL)

    top = commands.add_parser("top", parents=[asked], help="watch a running proxy in the terminal")
    top.add_argument("--once", action="store_true", help="print once and end")
    top.set_defaults(command=_calls("run_top", "once"))

    connections = commands.add_parser(
        "connections", parents=[asked], help="list who is connected to a proxy"
    )
    text_help = "only those with this in their client id, user, address or listener"
    connections.add_argument("--filter", default="", dest="text", metavar="TEXT", help=text_help)
    most = number_type(f"a number from 1 to {PAGE_ROWS}", 1, PAGE_ROWS)
    connections.add_argument("--limit", type=most, default=100, help="how many (default: 100)")
    connections.set_defaults(command=_calls("run_connections", "text", "limit"))

    tier = commands.add_parser("tier", parents=[asked], help="list who owns what in a tier")
    json_help = "print what is known as JSON, with each member's slots"
    tier.add_argument("--json", action="store_true", dest="as_json", help=json_help)
    tier.set_defaults(command=_calls("run_tier", "as_json"))

    chosen = argparse.ArgumentParser(add_help=False)
    for key in CLIENT_KEYS:
        chosen.add_argument(f"--{key}", dest=key, help=f"only clients with this {key}")
    chosen.add_argument("--by", default=_login_name(), help="who does it; shown and logged")
    chosen.set_defaults(command=_calls("change_throttling", "off", "on", "by", *CLIENT_KEYS))
    pause_help = "let clients through for a time: they are measured and held for nothing"
    pause = commands.add_parser("pause", parents=[asked, chosen], help=pause_help)
    for_help = "how long, or until when (default: 30m)"
    pause.add_argument("--for", dest="off", default="30m", metavar="TIME", help=for_help)
    pause.set_defaults(on=None)
    resume_help = "hold clients to their quotas again"
    resume = commands.add_parser("resume", parents=[asked, chosen], help=resume_help)
    resume.set_defaults(on=True, off=None)

    suggest_help = "print rules that would fit what was observed, as YAML"
    suggest = commands.add_parser("suggest", parents=[asked], help=suggest_help)
    since_help = "how far to look back, up to 168h (default: 24h)"
    suggest.add_argument("--since", default="24h", metavar="TIME", help=since_help)
    suggest.set_defaults(command=_calls("print_suggestions", "since"))


def _calls(function: str, *names: str) -> Callable[[argparse.Namespace], None]:
    """Return what calls a function of asking_commands with the options of these names.

    The module is imported only then: `run` needs none of it. What fails there on an answer's parts
    says that they are no proxy's.
    """

    def command(options: argparse.Namespace) -> None:
        given = {name: getattr(options, name) for name in names}
        module = import_module(f"{__package__}.asking_commands")
        client = admin_port_client(options)
        try:
            getattr(module, function)(client, **given)
        except MISREAD as error:
            raise client.no_proxy() from error

    return command


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


def number_type(what: str, low: int, high: float) -> Callable[[str], int]:
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


def admin_port_client(options: argparse.Namespace) -> AdminPortClient:
    """Return what these options name. Raises AdminClientError for a file that is of no use."""
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
    return AdminPortClient(options.url, tls, token)


def _token(path: Path) -> str:
    with path.open() as file:
        text = file.read(MAX_TOKEN_CHARS).strip()
    # What it holds is not for a terminal, nor is a header.
    if not text or not text.isprintable() or len(text) == MAX_TOKEN_CHARS:
        raise ValueError("holds no token, which is one line of text")
    return text


@contextmanager
def _used_as(option: str, path: Path, what: str) -> Iterator[None]:
    """Turn what fails about a file that an option names into an AdminClientError."""
    try:
        yield
    except UnicodeError:
        problem = "is not text"
    except (OSError, ValueError) as error:  # TLS raises the one or the other
        problem = getattr(error, "strerror", None) or str(error)
    else:
        return
    fix = f"name a file with {what}"
    raise AdminClientError(f"{option} {path}: {problem}", fix, is_bad_input=True)
