"""Figure: what a round trip costs a client that is far below its bound, near it, and at it.

Each share of a bound has a proxy of its own; all of them, and HAProxy, carry the same load at the
same time, so many requests per second. They are warm when the windows are full.
"""

from bench.client import Load
from bench.lab import followed_rule, open_lab, rule
from bench.rates import quantile
from bench.report import Row, Verdict

FIGURE = "near the bound"
CLIENT_ID = "bench-near"
BATCH_BYTES, EACH_PER_S = 20_000, 1000
SHARES = (0.01, 0.5, 0.8, 0.9, 0.97, 1.05)
"""Of the bound, that the client wants."""
WINDOWS_S, FULL_S, QUICK_S = 12.0, 20.0, 2.0
US_PER_S = 1e6


def measure(quick: bool) -> list[Row]:
    """Measure what the proxies and HAProxy use for each round trip."""
    duration_s = QUICK_S if quick else FULL_S
    with open_lab() as lab:
        direct = lab.start_generator([BATCH_BYTES])
        bounds = {share: f"{BATCH_BYTES * EACH_PER_S / share:.0f}" for share in SHARES}
        targets = {
            f"wants {share:.0%}": lab.start_proxy(direct.address, [rule(CLIENT_ID, bound)]).target()
            for share, bound in bounds.items()
        }
        followed = lab.start_proxy(
            direct.address, [followed_rule(CLIENT_ID)], queries=[{"name": CLIENT_ID}]
        )
        targets["followed"] = followed.target()
        rivals = {each.name: each for each in lab.start_haproxy(direct.address)[:1]}
        targets |= rivals
        loads = [
            Load(CLIENT_ID, *target.address, 1, BATCH_BYTES, in_session=True, per_s=EACH_PER_S)
            for target in targets.values()
        ]
        if not quick:
            lab.run_client(loads, WINDOWS_S)
        before: list[float] = []

        def opened() -> None:
            before.extend(target.usage()[0] for target in targets.values())

        outcome = lab.run_client(loads, duration_s, opened=opened)
        after = [target.usage()[0] for target in targets.values()]
    rows = []
    each_us = [
        (end_s - begun_s) * US_PER_S / len(served.completed_s)
        for begun_s, end_s, served in zip(before, after, outcome.served, strict=True)
    ]
    for name, cost_us, served in zip(targets, each_us, outcome.served, strict=True):
        against = f", {cost_us / each_us[-1]:.2f}x of haproxy" if rivals else ""
        p50_us = quantile(served.waited_s, 0.5) * US_PER_S
        text = f"CPU {cost_us:.0f} µs for each{against}; p50 {p50_us:.0f} µs"
        what = f"20 kB, {EACH_PER_S} per second, {name}"
        rows.append(Row(FIGURE, what, "", text, Verdict.INFO))
    return rows
