"""Reads what a record says: in the form that its reader knows, checked by a pydantic model."""

from typing import TypeVar
from urllib.parse import quote

from pydantic import BaseModel, ValidationError

from .store import Record

Form = TypeVar("Form", bound=BaseModel)


def read_form(record: Record, version: int, form: type[Form]) -> Form:
    """Return what a record says. Raises ValueError with what is wrong with it."""
    if record.version != version:
        raise ValueError(
            f"it has form {record.version}, this version of quota-proxy knows {version}"
        )
    try:
        return form.model_validate_json(record.text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{where}: {first['msg']}" if where else first["msg"]) from None


def quoted(text: str) -> str:
    """Return a text as one part of a key."""
    return quote(text, safe="", errors="surrogatepass")
