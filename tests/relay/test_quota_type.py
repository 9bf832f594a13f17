"""A quota type that is added as docs/contributing.md says is enforced on frames of every size."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 60

STEPS = {
    "proxy/quota/entities.py": (
        '    CONNECTION_RATE = "connection_rate", "new connections", CONNECTIONS_PER_SECOND\n',
        '    ANSWER_BYTE_RATE = "answer_byte_rate", "answers", BYTE_RATE\n',
    ),
    "proxy/relay/responses.py": (
        "            charge = kind.session.charge(CONSUMER_BYTE_RATE, frame_bytes, now_ms)\n",
        "        from proxy.quota.entities import QuotaKind\n"
        "        quota = QuotaKind.ANSWER_BYTE_RATE\n"
        "        answered = kind.session.charge(quota, frame_bytes, now_ms)\n"
        "        charge = longest_throttle((charge, answered))\n",
    ),
}
"""Behind which line of a file which ones are added: bytes of all responses are bounded."""

MOST_ANSWERS = 400
"""Of 50 bytes they are more than what the bound lets pass at once, ten seconds of it."""

SCRIPT = """
import asyncio, sys
import proxy
from relaylab import frames
from relaylab.lab import open_lab, until
from proxy.quota.entities import QuotaKind
from proxy.quota.rules import Rule

RULE = Rule(client_id="test", bounds={QuotaKind("answer_byte_rate"): 1000.0})

async def main(folder, answer_bytes, most):
    assert proxy.__file__.startswith(folder)
    async with open_lab(rules=(RULE,)) as lab:
        client = await lab.client()
        for number in range(most):
            asked = frames.request(frames.LIST_OFFSETS, 1, number)
            await client.send(asked)
            broker = broker if number else await lab.broker()
            assert await broker.frame() == asked
            await broker.send(frames.response(frames.LIST_OFFSETS, 1, number, bytes(answer_bytes)))
            await until(lambda: lab.held or client.unread)
            if lab.held:
                return
            await client.frame()
    raise AssertionError("nothing was held")

asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
"""


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources with one quota type more."""
    folder = tmp_path_factory.mktemp("quota-type")
    for room in ("proxy", "metrics"):
        shutil.copytree(ROOT / room, folder / room)
    for name, (line, added) in STEPS.items():
        text = (folder / name).read_text()
        assert text.count(line) == 1
        (folder / name).write_text(text.replace(line, line + added))
    return folder


@pytest.mark.parametrize("answer_bytes", [50, 300_000])
def test_what_contributing_says_is_enough(scratch: Path, answer_bytes: int) -> None:
    script = scratch / "script.py"
    script.write_text(SCRIPT)
    path = ":".join(map(str, (scratch, ROOT / "tests", ROOT / "tests" / "relay")))
    done = subprocess.run(
        [sys.executable, script, str(scratch), str(answer_bytes), str(MOST_ANSWERS)],
        env={"PYTHONPATH": path},
        cwd=scratch,
        timeout=LIMIT_S,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
