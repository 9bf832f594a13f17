"""Which records of the state are those of a pipeline, by their keys."""

from collections.abc import Iterable
from urllib.parse import unquote

from proxy.state import Record
from proxy.state.store import SEPARATOR

from .completion_records import LEDGER_RECORDS
from .controller import FLOW_RECORDS


def prefixes_of(pipeline: str) -> tuple[str, str]:
    """Return what the keys of a pipeline's records begin with, of its flow and of its ledger."""
    return f"{FLOW_RECORDS.key(pipeline)}/", f"{LEDGER_RECORDS['root'].key(pipeline)}/"


def pipeline_of(key: str) -> str:
    """Return the pipeline that the key of a record of a flow or a ledger names."""
    _, name, *_ = key.split(SEPARATOR)
    return unquote(name, errors="surrogatepass")


def records_under(records: Iterable[Record], prefix: str) -> list[Record]:
    """Return the records whose keys begin so."""
    return [record for record in records if record.key.startswith(prefix)]
