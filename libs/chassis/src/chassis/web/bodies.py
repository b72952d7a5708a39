"""What bodies are made of: camelCase names, instants with an offset, and only what the database can keep."""

import math
from typing import Annotated, Any, Final

from pydantic import AfterValidator, AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel

from chassis.clock import EARLIEST, LATEST

DEEPEST: Final = 32


class Body(BaseModel):
    """A request's or an answer's body: camelCase on the wire, unknown fields refused."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid")


def storable(value: Any, depth: int = 0) -> Any:
    """Return a JSON value that Postgres can keep as it is.

    Raises:
        ValueError: text with NUL or half a surrogate pair, a number that is none, or too many levels.
    """
    if depth > DEEPEST:
        raise ValueError(f"nested deeper than {DEEPEST} levels")
    if isinstance(value, str):
        value.encode()
        if "\0" in value:
            raise ValueError("text holds a NUL character")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError("NaN and infinity are not JSON")
    elif isinstance(value, (dict, list)):
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        for part in parts:
            storable(part, depth + 1)
    return value


def _written_out(value: Any) -> Any:
    """Refuse a count of seconds or milliseconds: which of them it is would be a guess."""
    if not isinstance(value, str) or "-" not in value[1:]:
        raise ValueError("an instant is text with date, time and offset")
    return value


Instant = Annotated[AwareDatetime, Field(ge=EARLIEST, lt=LATEST), BeforeValidator(_written_out)]
StorableText = Annotated[str, AfterValidator(storable)]
StorableObject = Annotated[dict[str, Any], AfterValidator(storable)]
Reason = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=500, pattern=r"^[^\x00]+$")]
"""Why somebody does something, for the audit and for who finds it done."""
