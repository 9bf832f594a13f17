"""Figure: what a client gets that does all it can to get more than its bound of 1 MB/s.

Real broker, proxies at their defaults, one in each throttle mode. Attempts go on side by side, as
each of them should take no more than its bound; one that got 500 MB all the same ends there.
"""

from bench.attempts import LOGIN, MODES, RATES, RULES, Ground, Outcome, run_all
from bench.lab import open_lab
from bench.report import Row, Verdict
from examples.devkit.broker import EmbeddedBroker

FIGURE = "evasion"
USER = ("alice", "alice-secret")
DURATION_S = 30.0
QUICK_DURATION_S = 5.0
MOST_BYTES = 500_000_000


def measure(quick: bool) -> list[Row]:
    """Make every attempt and give a row for each."""
    duration_s = QUICK_DURATION_S if quick else DURATION_S
    with open_lab() as lab:
        broker = lab.enter(EmbeddedBroker(lab.work_dir / "broker", sasl_users=dict([USER])))
        plain, sasl = _address(broker.bootstrap), _address(broker.sasl_bootstrap)
        proxies = {
            mode: lab.start_proxy(plain, RULES, mode=mode, pinned=False).bootstrap for mode in MODES
        }
        rules = [{"user": USER[0], **RATES}]
        proxies[LOGIN] = lab.start_proxy(sasl, rules, pinned=False).bootstrap
        outcomes = run_all(Ground(broker.bootstrap, proxies, USER), duration_s, MOST_BYTES)
    return [_row(outcome) for outcome in outcomes]


def _address(bootstrap: str) -> tuple[str, int]:
    host, _, port = bootstrap.rpartition(":")
    return host, int(port)


def _row(outcome: Outcome) -> Row:
    attempt = outcome.attempt
    return Row(
        FIGURE,
        f"{attempt.what} ({attempt.way})",
        f"at most {outcome.allowed_bytes / 1e6:.1f} MB in {outcome.elapsed_s:.0f} s",
        f"{outcome.got_bytes / 1e6:.1f} MB, {outcome.times_bound:.2f} times the bound",
        Verdict.of(outcome.is_within),
        {
            "got_bytes": outcome.got_bytes,
            "elapsed_s": outcome.elapsed_s,
            "spent_bytes": outcome.spent_bytes,
            "spent_s": outcome.spent_s,
            "told_ms": outcome.told_ms,
            "requests": outcome.requests,
        },
    )
