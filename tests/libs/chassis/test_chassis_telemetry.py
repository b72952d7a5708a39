"""Log lines are JSON, one each, whatever is logged; and what must not be in them is not."""

import asyncio
import contextvars
import io
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

import asyncpg
import orjson
import pytest
import structlog
from prometheus_client import Counter, generate_latest
from sqlalchemy.exc import IntegrityError

from chassis.telemetry import REDACTED, configure_logging, new_registry

Lines = Callable[[], list[dict[str, Any]]]
SECRET = "hunter2"


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lines]:
    """Logging as a service configures it; returns the lines written so far, each parsed."""
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    root = logging.getLogger()
    level, levels = root.level, {name: logging.getLogger(name).level for name in ("aiokafka", "alembic")}
    configure_logging("INFO", "test")
    [ours] = root.handlers

    def written() -> list[dict[str, Any]]:
        assert err.getvalue() == ""
        return [orjson.loads(line) for line in out.getvalue().splitlines()]

    yield written
    root.removeHandler(ours)
    root.setLevel(level)
    for name, old in levels.items():
        logging.getLogger(name).setLevel(old)
    logging.captureWarnings(capture=False)


def test_a_line_says_what_when_where_and_how_bad(lines: Lines):
    structlog.get_logger("some.module").warning("something happened", number=7, tenant=UUID(int=1))
    [line] = lines()
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "event": "something happened",
        "level": "warning",
        "logger": "some.module",
        "service": "test",
        "number": 7,
        "tenant": str(UUID(int=1)),
    }


def test_lines_below_the_level_are_not_written(lines: Lines):
    structlog.get_logger("a").debug("quiet")
    logging.getLogger("b").debug("quiet")
    assert lines() == []


def test_the_standard_librarys_records_are_lines_too(lines: Lines):
    logging.getLogger("library").error("port %d of %s", 7, "host", extra={"ignored": 1})
    [line] = lines()
    assert (line["event"], line["level"], line["logger"], line["service"]) == (
        "port 7 of host", "error", "library", "test",
    )  # fmt: skip


async def test_lines_carry_the_correlation_id_of_their_own_task(lines: Lines):
    async def request(number: int) -> None:
        with structlog.contextvars.bound_contextvars(correlation_id=f"req-{number}"):
            await asyncio.sleep(0)
            structlog.get_logger("a").info("ours", number=number)
            logging.getLogger("b").info("theirs")

    await asyncio.gather(*(request(number) for number in range(3)))
    contextvars.copy_context().run(structlog.get_logger("a").info, "outside")
    written = lines()
    assert {(line["event"], line["number"], line["correlation_id"]) for line in written if "number" in line} == {
        ("ours", number, f"req-{number}") for number in range(3)
    }
    assert sorted(line["correlation_id"] for line in written if line["event"] == "theirs") == [
        "req-0", "req-1", "req-2",
    ]  # fmt: skip
    assert "correlation_id" not in written[-1]


# --- what stays out


@pytest.mark.parametrize("key", ["payload", "Authorization", "PASSWORD", "email", "token", "full_name", "amount"])
def test_sensitive_values_are_blanked_at_any_depth(lines: Lines, key: str):
    log = structlog.get_logger("a")
    log.info("flat", **{key: SECRET, "kept": 1})
    log.info("deep", request={"kept": 1, "inner": [{key: SECRET}, {"x": ({key: [SECRET]},)}]})
    log.bind(**{key: SECRET}).info("bound")
    with structlog.contextvars.bound_contextvars(**{key: SECRET}):
        logging.getLogger("library").info("in context")
    written = lines()
    assert len(written) == 4
    assert SECRET not in orjson.dumps(written).decode()
    assert written[0][key] == REDACTED
    assert written[0]["kept"] == written[1]["request"]["kept"] == 1


def test_an_exception_is_told_without_the_values_of_its_variables(lines: Lines):
    def fail(password: str) -> None:
        token = password * 2
        if len(token) < 100:
            raise ValueError("too short")

    for log in (structlog.get_logger("a"), logging.getLogger("b")):
        try:
            fail(SECRET)
        except ValueError:
            log.exception("failed")
    written = lines()
    assert [line["event"] for line in written] == ["failed", "failed"]
    text = orjson.dumps(written).decode()
    assert SECRET not in text
    assert text.count("ValueError") == 2
    assert "too short" in text
    assert '"fail"' in text, "the frames are still there"


# --- what must not break a line


def test_anything_that_is_logged_is_one_line_of_json(lines: Lines):
    class Odd:
        def __repr__(self) -> str:
            return "odd"

        __str__ = __repr__

    del logging.getLogger().handlers[1:]  # what pytest keeps of the lines could not be carried to its main process
    log = structlog.get_logger("a")
    values = [
        "two\nlines", "\ud800", "\0", b"\xff", {1: 2}, {("a",): 1}, {1, 2}, 2**70, float("nan"), Odd(), [Odd()],
        {"deep": {"deeper": {UUID(int=1): Odd()}}}, LookupError("x"), None,
    ]  # fmt: skip
    for value in values:
        log.info("logged", value=value)
    log.info("\ud800")
    logging.getLogger("b").info("%s", "\ud800")
    assert len(lines()) == len(values) + 2


def test_a_value_that_contains_itself_is_one_line_of_json(lines: Lines):
    endless: list[object] = []
    endless.append(endless)
    structlog.get_logger("a").info("logged", value=endless)
    assert len(lines()) == 1


def test_wrong_arguments_of_a_library_cost_its_line_and_nothing_more(lines: Lines, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logging, "raiseExceptions", False)
    logging.getLogger("library").info("%d things", "seven")
    structlog.get_logger("a").info("next")
    assert lines()[-1]["event"] == "next"


# --- figures


def test_a_registry_exports_the_process_and_what_is_put_into_it():
    registry = new_registry()
    Counter("pin_tests", "Tests.", registry=registry).inc(3)
    text = generate_latest(registry).decode()
    assert "pin_tests_total 3.0" in text
    assert "process_resident_memory_bytes" in text
    assert "_created" not in text


def test_two_registries_are_apart():
    first, second = new_registry(), new_registry()
    Counter("pin_tests", "Tests.", registry=first)
    Counter("pin_tests", "Tests.", registry=second)
    assert first is not second


def test_a_process_warns_in_lines_of_json_too():
    """Only what the interpreter itself says at the end of a process is not JSON."""
    script = """
import logging, warnings
from chassis.telemetry import configure_logging
configure_logging("INFO", "test")
warnings.warn("this will be removed", DeprecationWarning, stacklevel=1)
raise SystemExit("the end")
"""
    command = [sys.executable, "-W", "always", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (1, "the end\n")
    [line] = [line for line in map(orjson.loads, done.stdout.splitlines()) if "will be removed" in line["event"]]
    assert (line["logger"], line["level"], line["service"]) == ("py.warnings", "warning", "test")


# --- what stays out, at depth


@pytest.mark.parametrize("depth", [1, 3, 5, 6, 9])
def test_a_sensitive_key_is_blanked_or_cut_off_however_deep(lines: Lines, depth: int):
    value: Any = {"email": SECRET, "kept": 1}
    for number in range(depth):
        value = {"inner": value} if number % 2 else [value]
    structlog.get_logger("a").info("deep", value=value)
    [line] = lines()
    assert SECRET not in orjson.dumps(line).decode()


@pytest.mark.parametrize("grouped", [False, True])
def test_what_the_database_quotes_of_a_row_is_not_logged(lines: Lines, grouped: bool):
    cause = asyncpg.UniqueViolationError("duplicate key")
    cause.detail = f"Key (email)=({SECRET}) already exists."
    assert SECRET in str(cause)
    try:
        try:
            raise cause
        except asyncpg.UniqueViolationError as error:
            raise (ExceptionGroup("several", [error]) if grouped else LookupError("outer")) from error
    except (LookupError, ExceptionGroup):
        structlog.get_logger("a").exception("failed")
    [line] = lines()
    told = orjson.dumps(line).decode()
    assert SECRET not in told
    assert "duplicate key" in told


def test_a_database_error_is_logged_without_the_statements_values(lines: Lines):
    error = IntegrityError("insert into crm.person (email) values ($1)", {"email": SECRET}, LookupError("unique"),
                           hide_parameters=True)  # fmt: skip
    try:
        raise error
    except IntegrityError:
        structlog.get_logger("a").exception("failed")
    [line] = lines()
    assert SECRET not in orjson.dumps(line).decode()
    assert "IntegrityError" in orjson.dumps(line).decode()
