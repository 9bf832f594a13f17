"""Scrapes of several members as one: each family once, with the samples of all as they are."""

import math
import shutil
import subprocess
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parts.instrument_rows import rows_of
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from metrics import Instruments, MemberInstruments, join_scrapes

HOSTILE = 'a"} 5\\\n# HELP x y\u2028\x85\x0b, b="other'


def samples_of(text: bytes) -> dict[str, list[object]]:
    """Return the samples by family, and check that none comes twice."""
    found: dict[str, list[object]] = {}
    for family in text_string_to_metric_families(text.decode()):
        assert family.name not in found
        found[family.name] = [(each.name, each.labels, str(each.value)) for each in family.samples]
    return found


def joined(scrapes: Iterable[bytes]) -> bytes:
    return b"".join(join_scrapes(scrapes))


def gauges(names: str, member: str, label: str, help_text: str = "A.") -> bytes:
    """Return a scrape with a gauge of each name."""
    registry = CollectorRegistry()
    for name in names:
        gauge = Gauge(name, help_text, ["member", "label"], registry=registry)
        gauge.labels(member, label).set(math.nan)
    return generate_latest(registry)


@pytest.fixture
def member() -> Instruments:
    made = Instruments(CollectorRegistry(), max_label_sets=10)
    made.bytes_total.of("default", "", HOSTILE, "Fetch").inc(1e17)
    made.throttle_seconds.labels("consumer_byte_rate").observe(0.3)
    made.delay_queue_size.labels("inf").set(math.inf)
    return made


def test_one_scrape_is_left_as_it_is(member: Instruments) -> None:
    text = generate_latest(member.registry)
    assert joined([text]) == joined([text, b""]) == text
    assert joined([]) == b""


@given(
    st.lists(
        st.tuples(st.text("abcd", max_size=4).map(lambda s: "".join(dict.fromkeys(s))), st.text())
    )
)
def test_all_samples_are_there_grouped_by_family(asked: list[tuple[str, str]]) -> None:
    texts = [gauges(names, str(n), label) for n, (names, label) in enumerate(asked)]
    expected: dict[str, list[object]] = {}
    for text in texts:
        for name, samples in samples_of(text).items():
            expected.setdefault(name, []).extend(samples)
    found = samples_of(joined(texts))
    assert found == expected
    assert list(found) == list(expected)


def test_the_first_one_says_what_a_family_means() -> None:
    text = joined([gauges("a", "0", "", "Before.\nSo."), gauges("ab", "1", "", "Now.")])
    assert text.splitlines()[:2] == [b"# HELP a Before.\\nSo.", b"# TYPE a gauge"]
    assert (text.count(b"# HELP"), text.count(b"# TYPE")) == (2, 2)


def test_promtool_takes_it(member: Instruments) -> None:
    path = shutil.which("promtool")
    assert path is not None, "promtool is missing: apt-get install prometheus"
    machine = MemberInstruments(CollectorRegistry())
    machine.member_up.labels("0").set(1)
    text = joined(map(generate_latest, (machine.registry, member.registry)))
    done = subprocess.run([path, "check", "metrics"], input=text, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_no_metric_of_a_member_has_the_label_that_it_is_given(member: Instruments) -> None:
    assert [row.name for row in rows_of(member) if "member" in row.labels] == []
