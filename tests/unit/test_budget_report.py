"""What `check` says of budgets: the worked figures, in the words that an operator reads."""

from pathlib import Path

from proxy.config import load_config
from proxy.config.check_report import explain_budgets

CONFIG = """\
cluster: {bootstrap_servers: [broker-1:9092]}
listeners:
  - {name: a, bind: 127.0.0.1:19092, advertised_host: h, broker_ports: 19100-19199}
quotas:
  budgets:
    - {name: adhoc, budget: analytics, weight: 1}
    - {name: analytics, consumer_byte_rate: 200MiB, producer_byte_rate: 10MiB}
  rules:
    - {client-id: etl, budget: analytics, guaranteed: 8MiB, weight: 3, consumer_byte_rate: 150MiB}
    - {client-id-prefix: notebook-, budget: adhoc}
    - {client-id: idle, consumer_byte_rate: 1MiB}
"""


def test_each_share_is_told_when_all_want_more_and_alone(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG)
    lines = list(explain_budgets(load_config(file).quota_settings.rules))
    assert [line.replace(str(file), "FILE") for line in lines] == [
        "budget analytics (FILE:7): consumer_byte_rate 200MiB per second for all its clients "
        "together",
        "  rule 0 (FILE:9), client-id=etl: 150MiB per second when all want more; 150MiB per second "
        "alone",
        "  budget adhoc (FILE:6): 50MiB per second when all want more; 200MiB per second alone",
        "    rule 1 (FILE:10), client-id-prefix=notebook-: 50MiB per second when all want more, if "
        "it has one client; 200MiB per second alone",
        "budget analytics (FILE:7): producer_byte_rate 10MiB per second for all its clients "
        "together",
        "  rule 0 (FILE:9), client-id=etl: 8MiB per second when all want more; 10MiB per second "
        "alone",
        "  budget adhoc (FILE:6): 2MiB per second when all want more; 10MiB per second alone",
        "    rule 1 (FILE:10), client-id-prefix=notebook-: 2MiB per second when all want more, if "
        "it has one client; 10MiB per second alone",
    ]
