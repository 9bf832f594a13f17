"""`quota-proxy usage` and what is of no use to it: one message, and the right exit code."""

from pathlib import Path

import pytest
import yaml
from support.operating import quota_proxy
from support.proxy_process import config

from examples.devkit.broker import EmbeddedBroker
from examples.devkit.jars import connector_jars

pytestmark = pytest.mark.slow

OVERLAP = "teams: [{name: a, users: [alice]}, {name: b, users: [alice]}]"


@pytest.fixture
def file(kafka: EmbeddedBroker, tmp_path: Path) -> Path:
    path = tmp_path / "proxy.yaml"
    path.write_text(yaml.safe_dump(config(kafka.bootstrap)))
    return path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--days", "0"], "--days 0: write a number from 1 to 3660"),
        (["--days", "two"], "invalid int value: 'two'"),
        (["--days", "2", "--from", "2026-10-01"], "both say where to begin"),
        (["--from", "2026-10-02", "--to", "2026-10-01"], "no span of days"),
        (["--to", "yesterday"], "'yesterday' is not a day such as 2026-11-26"),
        (["--set", "spark.jars"], "'spark.jars' is not KEY=VALUE"),
        (["--out", "/proc/report"], "--out /proc/report: "),
        (["-c", "none.yaml"], '"none.yaml" does not exist'),
    ],
)
def test_bad_usage_is_told_of_before_spark_starts(
    file: Path, tmp_path: Path, words: list[str], said: str
) -> None:
    arguments = ["-c", file, "--out", tmp_path / "out", *words]
    code, out, err = quota_proxy("usage", "report", *arguments)
    assert (code, out) == (2, "")
    assert said in err


def test_what_only_spark_can_tell_is_one_line(file: Path, tmp_path: Path) -> None:
    teams = tmp_path / "teams.yaml"
    teams.write_text(OVERLAP)
    report = ("usage", "report", "-c", file, "--out", tmp_path / "out")
    code, out, err = quota_proxy(*report, "--parquet", tmp_path / "none", "--teams", teams)
    assert (code, out) == (2, "")
    assert err.startswith(f"{teams}: teams 'a' and 'b' overlap: a.users has 'alice', b.users has ")
    assert err.count("\n") == 1

    code, out, err = quota_proxy(*report, "--parquet", tmp_path / "none")
    assert (code, out) == (2, "")
    assert "no usage records from " in err
    assert err.count("\n") == 1

    jars = f"spark.jars={','.join(map(str, connector_jars()))}"
    code, out, err = quota_proxy(*report, "--set", jars)
    assert (code, out) == (1, "")
    assert "UnknownTopicOrPartitionException" in err
    assert err.count("\n") == 1
    Path(err.rpartition("its log: ")[2].strip()).unlink()
