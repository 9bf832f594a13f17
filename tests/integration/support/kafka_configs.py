"""Kafka's own `kafka-configs.sh`."""

from support.kafka_tools import run_tool


def alter_quotas(bootstrap: str, change: str, *entity: str) -> None:
    """Change client quotas as an operator does.

    `change` is such as `+consumer_byte_rate=1000,request_percentage=5` or `-consumer_byte_rate`;
    `entity` are the tool's arguments, such as `--entity-type clients --entity-name etl`.
    """
    option = "--add-config" if change[0] == "+" else "--delete-config"
    said = run_tool("kafka.admin.ConfigCommand", bootstrap, "--alter", option, change[1:], *entity)
    assert "Completed updating" in said, said
