"""The command line: arguments in, exit codes out."""

import argparse
import asyncio
import atexit
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import MAXYEAR, MINYEAR, datetime
from functools import partial
from importlib.util import find_spec
from io import TextIOWrapper
from pathlib import Path
from types import TracebackType

import structlog
import uvloop

from proxy.admin.commands.operator_commands import add_commands, number_type
from proxy.admin.document_models import printable
from proxy.config import Config, load_config
from proxy.config.check_report import (
    explain_budgets,
    explain_out_of_force,
    explain_rules_of_client,
    find_hints,
)
from proxy.config.endpoints import MAX_PORT
from proxy.errors import ProxyError, os_error_fix
from proxy.garbage import spare_full_collections
from proxy.hot_restart import serve_until
from proxy.launcher.launcher import Launcher
from proxy.log_queue import LibraryLog, log_level, log_queue
from proxy.member import Member, log_hints
from proxy.onboarding.doctor_command import add_doctor
from proxy.onboarding.init_command import add_init
from proxy.quota.entities import ClientIdentity, shortened_client_id
from proxy.quota.rules import RuleTable
from proxy.quota.scheduled_rules import ScheduledSettings
from proxy.quota.values import BadValueError
from proxy.relay.take_over import Predecessor, TakeOverError
from proxy.release import VERSION, CheckoutRequiredError
from proxy.tier import key_rules
from proxy.wiring import prepare_process

STDIN, STDOUT, STDERR = range(3)
EXIT_DONE, EXIT_FAILED, EXIT_BAD_INPUT = 0, 1, 2

_log = structlog.get_logger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code: 0 done, 1 failed while running, 2 bad input."""
    try:
        _have_standard_streams()
        options = _parser().parse_args(arguments)
        code: int | None = options.command(options)
        sys.stdout.flush()
        return code or EXIT_DONE
    except BrokenPipeError:  # who reads the output has enough of it, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except BadValueError as error:  # such as a file that was sound a moment ago
        return _complain(f"{error.message}\n    fix: {error.fix}", EXIT_BAD_INPUT)
    except ProxyError as error:
        return _complain(str(error), EXIT_BAD_INPUT if error.is_bad_input else EXIT_FAILED)
    except OSError as error:
        fix = os_error_fix(error, "see that it is there and may be used")
        return _complain(f"{error}\n    fix: {fix}", EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_FAILED
    finally:
        log_queue.wait_written()


def _have_standard_streams() -> None:
    """Open what of the standard descriptors is closed, and escape what cannot be encoded.

    Else the loop of events gets their numbers, with which it cannot be closed.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        pass
    os.close(descriptor)
    sys.stdin = sys.stdin or os.fdopen(STDIN, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(STDOUT, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(STDERR, "w", closefd=False)
    if isinstance(sys.stdout, TextIOWrapper):
        with suppress(OSError):  # a pipe in the place of a file, of which it asks where it is
            sys.stdout.reconfigure(errors="backslashreplace")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="quota-proxy", description="A Kafka proxy that holds each client to its quota."
    )
    parser.add_argument("--version", action="version", version=f"quota-proxy {VERSION}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    config = argparse.ArgumentParser(add_help=False)
    config.add_argument("-c", "--config", type=Path, required=True, help="the YAML file")
    run = commands.add_parser("run", parents=[config], help="run the proxy")
    run.add_argument("--log-format", choices=("console", "json"), default="json")
    copy_help = "copy record data through user space always"
    run.add_argument("--no-splice", action="store_true", help=copy_help)
    take_over_help = "replace this running proxy: check and open all, then have it stop"
    run.add_argument("--take-over", type=_process, metavar="PID", help=take_over_help)
    run.set_defaults(command=_run)

    check_help = "validate a configuration; say which rule a client gets"
    check = commands.add_parser("check", parents=[config], help=check_help)
    check.add_argument("--user", help="authenticated user of the client")
    check.add_argument("--client-id", help="client id of the client")
    check.add_argument("--listener", help="name of the listener that the client comes in by")
    check.add_argument("--at", type=_time, help="when it would run, such as 2026-11-28T09:00")
    check.set_defaults(command=_check)

    add_init(commands)
    add_doctor(commands)
    add_commands(commands)

    usage = commands.add_parser("usage", help="report who used what of the cluster, by Spark")
    what_help = "make a page, a table and rules of some days, or copy the topic to Parquet files"
    usage.add_argument("what", choices=("report", "stream"), help=what_help)
    words_help = "see `quota-proxy usage report --help`"
    usage.add_argument("words", nargs=argparse.REMAINDER, metavar="...", help=words_help)
    usage.set_defaults(command=_run_usage)

    demo = commands.add_parser("demo", help="see a PySpark query held to its quota")
    shows = ("quotas", "budgets", "backpressure", "pipeline", "tier", "usage")
    show_help = "what to see (default: quotas)"
    demo.add_argument("show", nargs="?", choices=shows, default="quotas", help=show_help)
    size = number_type("a number of MiB, 1 or more", 1, math.inf)
    size_help = "MiB of records for the query to read (default: 100, about 50 s)"
    demo.add_argument("--megabytes", type=size, help=size_help)
    demo.add_argument("--brief", action="store_true", help="not of quotas: a shorter run")
    demo.set_defaults(command=_run_example, example="demo")

    broker = commands.add_parser("broker", help="run an embedded Kafka broker, for development")
    port = number_type(f"a port from 0 to {MAX_PORT}", 0, MAX_PORT)
    broker.add_argument("--port", type=port, required=True, help="port to serve; 0: any free one")
    broker.add_argument("--data", type=Path, required=True, help="directory for its data")
    broker.set_defaults(command=_run_example, example="broker")
    return parser


def _time(text: str) -> float:
    """Parse a time, of this machine's zone where it names none; return it since the epoch."""
    try:
        moment = datetime.fromisoformat(text)
        if not MINYEAR < moment.year < MAXYEAR:  # no calendar has what is before or behind it
            raise ValueError
        return moment.timestamp()
    except (ValueError, OverflowError, OSError):
        message = f"{text!r} is not a time such as 2026-11-28T09:00 or 2026-11-28T09:00+01:00"
        raise argparse.ArgumentTypeError(message) from None


def _process(text: str) -> int:
    """Parse the id of another process."""
    if not text.isdecimal() or int(text) in (0, os.getpid()):
        raise argparse.ArgumentTypeError(f"{text!r} is not the id of another process")
    if not Path(f"/proc/{int(text)}").is_dir():
        raise argparse.ArgumentTypeError(f"no process {text!r} to replace")
    return int(text)


def _complain(message: str, code: int) -> int:
    sys.stderr.write(f"{message}\n")
    return code


def _run(options: argparse.Namespace) -> int:
    config = load_config(options.config)
    configure_logging(options.log_format)
    try:
        predecessor = None if options.take_over is None else Predecessor(options.take_over)
    except TakeOverError as error:
        return _complain(f"--take-over: {error}", EXIT_BAD_INPUT)
    # Members are forked from within a launcher's event loop, which uvloop's does not survive.
    run = uvloop.run if config.worker_count == 1 else asyncio.run
    run(_serve(config, options, predecessor))
    return EXIT_DONE


async def _serve(
    config: Config, options: argparse.Namespace, predecessor: Predecessor | None
) -> None:
    stop = asyncio.Event()
    kind = Member if config.worker_count == 1 else Launcher
    served = kind(config, options.config, splice=not options.no_splice)
    handlers = {signal.SIGTERM: stop.set, signal.SIGINT: stop.set, signal.SIGHUP: served.reload}
    loop = asyncio.get_running_loop()
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    prepare_process()
    log_hints(config)
    try:
        await served.start(predecessor, stop)
        served.accept()
        await serve_until(stop, _started, served)
    finally:
        for number in handlers:  # else one more kills the process while Python ends
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)


def _started() -> None:
    spare_full_collections()
    threading.Thread(target=_announce, name="ready", daemon=True).start()


def _announce() -> None:
    """Write `ready` behind what the log says of the start. It may block, and for ever."""
    log_queue.wait_written()
    with suppress(OSError):
        os.write(sys.stdout.fileno(), b"ready\n")


def configure_logging(log_format: str) -> None:
    """Have all that is logged written to standard error, as JSON or for people, by `log_queue`.

    Likewise what libraries log, warnings, exceptions that nobody catches, and what is printed.
    """
    processors: list[structlog.typing.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    if log_format == "json":
        processors += [structlog.processors.JSONRenderer()]
    else:
        # The default shows local variables too, and among them may be a password.
        plain, colors = structlog.dev.plain_traceback, log_queue.isatty()
        console = partial(structlog.dev.ConsoleRenderer, exception_formatter=plain)
        processors += [_escape, console(colors=colors, repr_native_str=True)]
    structlog.configure(
        processors=[log_level.process, log_queue.rendering(processors)],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),
        logger_factory=lambda *_: log_queue,
        cache_logger_on_first_use=True,
    )
    sys.stderr = log_queue
    logging.basicConfig(handlers=[LibraryLog()], force=True)
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    sys.unraisablehook = threading.excepthook = _log_ignored
    atexit.register(log_queue.wait_written)


def _escape(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Leave nothing in what a log line does not quote that steers a terminal, but ends of lines."""
    for key in event.keys() & {"event", "exception"}:
        event[key] = "\n".join(map(printable, str(event[key]).split("\n")))
    return event


def _log_uncaught(
    kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
) -> None:
    _log.error("unexpected error", exc_info=(kind, error, trace))


def _log_ignored(caught: "sys.UnraisableHookArgs | threading.ExceptHookArgs") -> None:
    # A client's server name that is not ASCII, of which `ssl` tells so: its handshake fails.
    is_server_name = isinstance(getattr(caught, "object", None), bytes)
    if not (is_server_name and caught.exc_type is UnicodeDecodeError):
        _log_uncaught(caught.exc_type, caught.exc_value, caught.exc_traceback)


def _check(options: argparse.Namespace) -> int:
    config = load_config(options.config)
    names = [listener.name for listener in config.listeners]
    if options.listener is not None and options.listener not in names:
        message = f"--listener: {options.listener!r} is not in {options.config}"
        return _complain(f"{message}\n    fix: use one of {', '.join(names)}", EXIT_BAD_INPUT)
    lines = [
        f"{options.config}: valid, rules: {len(config.quotas.rules)}, listeners: {len(names)}, "
        f"queries: {len(config.queries)}, pipelines: {len(config.pipelines)}"
    ]
    at_s = time.time() if options.at is None else options.at
    settings = ScheduledSettings.at(config.quota_settings, at_s).settings
    table = RuleTable(settings.rules, enforce=settings.enforce)
    lines += explain_out_of_force(config.quota_settings, at_s)
    lines += explain_budgets(settings.rules)
    lines += find_hints(config, table)
    keys = key_rules.make_quota_keys(config, table)
    lines += key_rules.find_undivided_rules(config, table, keys)
    if (options.user, options.client_id, options.listener) != (None, None, None):
        client_id = shortened_client_id(options.client_id)
        identity = ClientIdentity(options.listener or names[0], options.user, client_id)
        lines += explain_rules_of_client(config, table, identity)
        lines += key_rules.explain_key(config, table, keys, identity)
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return EXIT_DONE


def _run_usage(options: argparse.Namespace) -> int:
    """Run what needs pyspark, which is not installed with the proxy."""
    if find_spec("pyspark") is None:
        return _complain("usage needs pyspark; fix: pip install 'pyspark>=3.5'", EXIT_BAD_INPUT)
    from proxy.onboarding.local_usage import run_usage  # noqa: PLC0415 - Spark takes a second

    return run_usage(options.what, options.words)


def _run_example(options: argparse.Namespace) -> int:
    """Run what only a checkout has. Raises CheckoutRequiredError where this is none."""
    checkout, name = Path(__file__).parents[1], options.example
    if not (checkout / "examples" / "demo").is_dir():
        reason = "is not there, for only a checkout of the project has it"
        message = f"{name}: {checkout}/examples/{name} {reason}"
        raise CheckoutRequiredError(f"{message}; fix: run `make {name}` in one")
    sys.path.insert(0, str(checkout))
    if name == "demo":
        from examples.demo import run_demo  # noqa: PLC0415 - not installed with the proxy

        return run_demo(options.show, options.megabytes, options.brief)
    from examples.devkit.command import serve_broker  # noqa: PLC0415

    return serve_broker(options.port, options.data)
