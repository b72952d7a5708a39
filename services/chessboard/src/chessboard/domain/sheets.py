"""What people say of property objects, one by one or in a file: read, and judged line by line; pure.

A file is CSV in UTF-8 whose first line names the columns, in any order, separated by `;` or `,`. Numbers may have a
decimal comma and spaces between thousands. Every fault is told with its line, its column and a code for programs.
"""

import csv
import io
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from types import MappingProxyType
from typing import Any, Final

from chessboard.domain.objects import DomainError, Status

MOST_LINES: Final = 10_000
LONGEST_NUMBER: Final = 32
LONGEST_NAME: Final = 255
MOST_SECTIONS: Final = 100
LOWEST_FLOOR: Final = -20
HIGHEST_FLOOR: Final = 300
MOST_ROOMS: Final = 100
LARGEST_AREA: Final = Decimal("99999999.99")
HIGHEST_PRICE: Final = 10**15
"""In minor units."""

MINOR_DIGITS: Final[Mapping[str, int]] = MappingProxyType(
    dict.fromkeys(("CLP", "ISK", "JPY", "KRW", "PYG", "UGX", "VND", "XAF", "XOF", "XPF"), 0)
    | dict.fromkeys(("BHD", "IQD", "JOD", "KWD", "LYD", "OMR", "TND"), 3)
)
"""Decimal digits of the currencies that have other than two (ISO 4217)."""

REQUIRED: Final = ("building", "section", "number", "floor", "rooms", "area", "price")
OPTIONAL: Final = ("currency", "status")
IMPORTED_STATUSES: Final[Mapping[str, Status]] = MappingProxyType({"free": Status.FREE, "hidden": Status.HIDDEN})
_SPACES: Final = re.compile(r"[ \u00a0\u2009\u202f]")
_DECIMAL: Final = re.compile(r"-?[0-9]{1,18}(?:[.,][0-9]{1,9})?")
_WHOLE: Final = re.compile(r"-?[0-9]{1,9}")
_CURRENCY: Final = re.compile(r"[A-Z]{3}")
_UNPRINTABLE: Final = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


class ImportRefused(DomainError):
    """Lines of the file are not valid, and nothing was imported; `errors` names line, column and code of each.

    Attributes:
        errors: the faults, in the order of lines.
    """

    def __init__(self, errors: "list[LineError]") -> None:
        super().__init__(f"{len(errors)} places of the file are not valid; nothing was imported")
        self.errors = errors

    @property
    def places(self) -> list[dict[str, str | int | None]]:
        """The faults as an answer names them."""
        return [
            {
                "location": f"line.{error.line}" if error.column is None else f"line.{error.line}.{error.column}",
                "line": error.line,
                "column": error.column,
                "code": error.code,
                "message": error.message,
            }
            for error in self.errors
        ]


@dataclass(frozen=True, slots=True)
class LineError:
    """What is wrong with a place of a file.

    Attributes:
        line: counted from 1, the header's; 0 for the file as a whole.
        column: the column's name; None for the line as a whole.
        code: for programs.
        message: for people.
    """

    line: int
    column: str | None
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class ImportLine:
    """One object as a line of a file describes it.

    Attributes:
        line: where it begins.
        building: the building's name.
        status: Free or Hidden where the file says it.
    """

    line: int
    building: str
    section: int
    number: str
    floor: int
    rooms: int
    area: Decimal
    price_minor: int
    currency: str
    status: Status | None


@dataclass(slots=True)
class Sheet:
    """A file, read: its valid lines, and what is wrong with the others."""

    lines: list[ImportLine] = field(default_factory=list)
    errors: list[LineError] = field(default_factory=list)
    count: int = 0

    def refuse(self, line: int, column: str | None, code: str, message: str) -> None:
        """Note a fault."""
        self.errors.append(LineError(line, column, code, message))


class _Faulty(Exception):
    """A field is not valid; the arguments are its code and a sentence."""


def read_sheet(content: bytes, currency: str | None = None) -> Sheet:
    """Read a file of objects.

    Args:
        content: the file.
        currency: of prices that have none in the file.
    """
    sheet = Sheet()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        sheet.refuse(0, None, "not_utf8", f"the file is not UTF-8 at byte {error.start}")
        return sheet
    rows = _rows(text, sheet)
    _, header = next(rows, (0, None))
    if header is None:
        if not sheet.errors:
            sheet.refuse(0, None, "empty", "the file has no line")
        return sheet
    columns = _columns(header, sheet)
    if sheet.errors:
        return sheet
    first: dict[tuple[str, str], int] = {}
    for line, row in rows:
        sheet.count += 1
        if sheet.count > MOST_LINES:
            sheet.refuse(line, None, "too_many_lines", f"a file has {MOST_LINES} lines of objects at most")
            return sheet
        read = _line(line, row, columns, currency, sheet)
        if read is None:
            continue
        before = first.setdefault((read.building, read.number), line)
        if before == line:
            sheet.lines.append(read)
        else:
            sheet.refuse(line, "number", "repeated", f"the same object stands in line {before}")
    if not sheet.count and not sheet.errors:
        sheet.refuse(0, None, "empty", "the file has no line but its header")
    return sheet


def _rows(text: str, sheet: Sheet) -> Iterator[tuple[int, list[str]]]:
    """Yield lines that aren't blank, each with the number of the physical line in which it begins."""
    header = text.lstrip("\r\n").partition("\n")[0]
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=";" if ";" in header else ",", strict=True)
    while True:
        line = reader.line_num + 1
        try:
            row = next(reader, None)
        except csv.Error as error:
            sheet.refuse(line, None, "not_csv", f"the line is not CSV, and what follows is not read: {error}")
            return
        if row is None:
            return
        if any(part.strip() for part in row):
            yield line, row


def _columns(header: list[str], sheet: Sheet) -> list[str]:
    names = [name.strip().lower() for name in header]
    for at, name in enumerate(names):
        if name not in REQUIRED + OPTIONAL:
            sheet.refuse(1, name[:64], "unknown_column", "there is no such column")
        elif name in names[:at]:
            sheet.refuse(1, name, "repeated_column", "the column is there twice")
    for name in REQUIRED:
        if name not in names:
            sheet.refuse(1, name, "missing_column", "the column is missing")
    return names


def _line(line: int, row: list[str], columns: list[str], currency: str | None, sheet: Sheet) -> ImportLine | None:
    if len(row) != len(columns):
        sheet.refuse(line, None, "wrong_field_count", f"the line has {len(row)} fields and the header {len(columns)}")
        return None
    given = {name: value.strip() for name, value in zip(columns, row, strict=True)}
    given["currency"] = given.get("currency") or currency or ""
    faults = len(sheet.errors)
    read: dict[str, Any] = {}
    for name, reader in _READERS.items():
        try:
            read[name] = reader(given.get(name, ""))
        except _Faulty as fault:
            sheet.refuse(line, name, *fault.args)
    try:
        if "price" in read and "currency" in read:
            read["price_minor"] = _to_minor(read.pop("price"), read["currency"])
    except _Faulty as fault:
        sheet.refuse(line, "price", *fault.args)
    return ImportLine(line=line, **read) if len(sheet.errors) == faults else None


def _to_minor(price: Decimal, currency: str) -> int:
    """Return a price in minor units of its currency."""
    scaled = price.scaleb(MINOR_DIGITS.get(currency, 2))
    if scaled != scaled.to_integral_value():
        raise _Faulty("too_precise", f"{currency} has no such fraction")
    if not 0 <= scaled <= HIGHEST_PRICE:
        raise _Faulty("out_of_range", f"a price is between 0 and {HIGHEST_PRICE} minor units")
    return int(scaled)


def _text(longest: int, value: str) -> str:
    if not value:
        raise _Faulty("required", "the field is empty")
    if len(value) > longest:
        raise _Faulty("too_long", f"{longest} characters at most")
    if _UNPRINTABLE.search(value):
        raise _Faulty("not_text", "the field holds control characters")
    return value


def _decimal(value: str) -> Decimal:
    text = _SPACES.sub("", _text(64, value))
    if not _DECIMAL.fullmatch(text):
        raise _Faulty("not_a_number", "not a number such as 54,30")
    return Decimal(text.replace(",", "."))


def _whole(lowest: int, highest: int, value: str) -> int:
    text = _text(64, value)
    if not _WHOLE.fullmatch(text):
        raise _Faulty("not_a_number", "not a whole number")
    if not lowest <= int(text) <= highest:
        raise _Faulty("out_of_range", f"between {lowest} and {highest}")
    return int(text)


def _area(value: str) -> Decimal:
    area = _decimal(value)
    if not 0 < area <= LARGEST_AREA:
        raise _Faulty("out_of_range", f"above 0 and up to {LARGEST_AREA}")
    if area != area.quantize(Decimal("0.01")):
        raise _Faulty("too_precise", "two decimals at most")
    return area


def _currency(value: str) -> str:
    code = _text(64, value).upper()
    if not _CURRENCY.fullmatch(code):
        raise _Faulty("not_a_currency", "a code of three letters, such as RUB")
    return code


def _status(value: str) -> Status | None:
    if not value:
        return None
    status = IMPORTED_STATUSES.get(value.lower())
    if status is None:
        raise _Faulty("unknown_status", "Free or Hidden; what is held or sold is not imported")
    return status


_READERS: Final[Mapping[str, Callable[[str], Any]]] = {
    "building": lambda value: _text(LONGEST_NAME, value),
    "section": lambda value: _whole(1, MOST_SECTIONS, value),
    "number": lambda value: _text(LONGEST_NUMBER, value),
    "floor": lambda value: _whole(LOWEST_FLOOR, HIGHEST_FLOOR, value),
    "rooms": lambda value: _whole(0, MOST_ROOMS, value),
    "area": _area,
    "price": _decimal,
    "currency": _currency,
    "status": _status,
}
