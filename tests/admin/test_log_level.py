"""Which log lines are written, and how an operator changes it."""

from collections.abc import AsyncIterator, Iterator

import pytest
from admin_world import AdminWorld, Ask, serve
from structlog import DropEvent
from structlog.testing import capture_logs

from proxy.log_queue import LEVELS, LogLevelFilter, log_level


@pytest.fixture
async def ask() -> AsyncIterator[Ask]:
    async with serve(AdminWorld().server()) as ask:
        yield ask


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = log_level.name
    yield
    log_level.set(before)


@pytest.mark.parametrize("name", LEVELS)
def test_lines_below_the_level_are_dropped(name: str):
    level = LogLevelFilter()
    level.set(name)
    written = []
    for method in (*LEVELS, "critical"):
        try:
            written.append(level.process(None, method, method))
        except DropEvent:
            continue
    assert written == [*LEVELS[LEVELS.index(name) :], "critical"]


def test_an_unknown_level_is_none():
    with pytest.raises(ValueError, match="loud"):
        log_level.set("loud")
    assert log_level.name == "info"


async def test_an_operator_changes_it(ask: Ask):
    assert (await ask("GET", "/v1/log_level")).json == {"level": "info"}
    with capture_logs() as lines:
        answer = await ask("PUT", "/v1/log_level", json={"level": "debug"})
    assert (answer.status, answer.json) == (200, {"level": "debug"})
    assert log_level.name == "debug"
    (line,) = lines
    assert (line["event"], line["after"], line["before"]) == ("log level changed", "debug", "info")
    assert "level" not in line  # what the processor that says the level would replace


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("{", "the body is not JSON: "),
        pytest.param("9" * 5_000, "the body is not JSON: ", id="a long number"),
        ("[]", "the body is not a JSON object"),
        ('{"level": "info", "for": "5m"}', 'unknown key "for"'),
        ('{"level": "info", "level": "debug"}', 'the key "level" is there twice'),
        ('{"level": "loud"}', "the level is not known"),
        ('{"level": ["info"]}', "the level is not known"),
    ],
)
async def test_what_is_no_level_is_refused(ask: Ask, body: str, what: str):
    headers = {"Content-Type": "application/json"}
    answer = await ask("PUT", "/v1/log_level", data=body, headers=headers)
    assert (answer.status, answer.json["error"].startswith(what)) == (400, True)
    assert "sys." not in answer.json["error"]  # what mends it is nothing that Python has
    assert log_level.name == "info"


async def test_it_needs_the_token():
    async with serve(AdminWorld().server(token="secret")) as ask:
        assert (await ask("PUT", "/v1/log_level", json={"level": "debug"})).status == 401
        headers = {"Authorization": "Bearer secret"}
        answer = await ask("PUT", "/v1/log_level", json={"level": "error"}, headers=headers)
        assert answer.status == 200
