"""Rules of the house that the source text shows; each is a function over one file's text, and seen refusing a breach.

A rule returns one sentence per breach, which names the file and the line.
"""

import ast
import gc
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHASSIS = "libs/chassis/src/chassis"
COMMITTERS = {
    f"{CHASSIS}/db.py": "session.commit",
    f"{CHASSIS}/migrations.py": "connection.commit",
    f"{CHASSIS}/messaging/kafka/group.py": "self._client.commit",  # offsets, after the database
}
KAFKA_CLIENTS = {f"{CHASSIS}/messaging/kafka/{name}.py" for name in ("producer", "topics", "group", "tail", "causes")}
_DRIVERS = (
    "jobs", "runtime", "batching", "consumers/batches", "consumers/parking", "web/envelope", "web/operations",
)  # fmt: skip
DRIVERS = {f"{CHASSIS}/{name}.py" for name in _DRIVERS}
TASK_STARTERS = {"create_task", "ensure_future"}
BANNED_WORDS = {"utils", "util", "common", "helpers", "helper", "base", "manager", "data", "info"}
SQLALCHEMY_HOOKS = {"process_bind_param", "process_result_value"}
LONGEST = 400

parse = lru_cache(maxsize=None)(ast.parse)
Rule = Callable[[str, str], list[str]]


@pytest.fixture(scope="module", autouse=True)
def _nothing_left_to_collect() -> None:
    """Python 3.11 fails in ast.parse if finalizers of an earlier test's futures run code in the middle of it."""
    gc.collect()


def sources(*folders: str) -> dict[str, str]:
    """Return the Python files below folders of the repository: name -> text."""
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def calls(text: str) -> Iterator[tuple[ast.Call, str]]:
    """Yield each call with the dotted text of what is called."""
    for node in ast.walk(parse(text)):
        if isinstance(node, ast.Call):
            yield node, ast.unparse(node.func)


def imports(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and dotted name of everything that is imported."""
    for node in ast.walk(parse(text)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module or ''}.{alias.name}") for alias in node.names)


def commits_elsewhere(name: str, text: str) -> list[str]:
    """Only chassis.db commits (and the migrations' connection, before Alembic takes over)."""
    found = [
        f"{name}:{node.lineno}: {called}() commits; only chassis.db does"
        for node, called in calls(text)
        if called.endswith(".commit") and COMMITTERS.get(name) != called
    ]
    return found + [
        f"{name}:{node.lineno}: AUTOCOMMIT commits by itself; only chassis.db commits"
        for node in ast.walk(parse(text))
        if isinstance(node, ast.Constant) and node.value == "AUTOCOMMIT"
    ]


def kafka_clients_elsewhere(name: str, text: str) -> list[str]:
    """One file imports aiokafka."""
    return [
        f"{name}:{line}: imports {imported}; only chassis.messaging.kafka imports aiokafka"
        for line, imported in imports(text)
        if imported.split(".")[0] == "aiokafka" and name not in KAFKA_CLIENTS
    ]


def swallows_everything(name: str, text: str) -> list[str]:
    """Only the drivers catch everything; elsewhere whoever does must raise again."""

    def everything(node: ast.expr | None) -> bool:
        if isinstance(node, ast.Tuple):
            return any(map(everything, node.elts))
        return node is None or ast.unparse(node) in {"Exception", "BaseException"}

    def raises_again(handler: ast.ExceptHandler) -> bool:
        last = handler.body[-1]
        return isinstance(last, ast.Raise) and last.exc is None

    if name in DRIVERS:
        return []
    handlers = [
        f"{name}:{node.lineno}: catches everything; only the drivers of chassis do"
        for node in ast.walk(parse(text))
        if isinstance(node, ast.ExceptHandler) and everything(node.type) and not raises_again(node)
    ]
    return handlers + [
        f"{name}:{node.lineno}: suppresses everything; only the drivers of chassis catch it"
        for node, called in calls(text)
        if called.endswith("suppress") and any(everything(argument) for argument in node.args)
    ]


def loses_work(name: str, text: str) -> list[str]:
    """Durable work is an outbox row or a declared job; a task that nobody holds can vanish in the middle."""
    found = [
        f"{name}:{line}: {imported.split('.')[-1]} is not used here"
        for line, imported in imports(text)
        if imported.split(".")[-1] in {"BackgroundTasks", "BackgroundTask", "BaseHTTPMiddleware"}
    ]
    return found + [
        f"{name}:{node.lineno}: the task is dropped; keep it, or it may be collected while it runs"
        for node in ast.walk(parse(text))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func).split(".")[-1] in TASK_STARTERS
    ]


def starts_work_of_its_own(name: str, text: str) -> list[str]:
    """Services start no tasks and threads: chassis.runtime supervises what they declare."""
    return [
        f"{name}:{node.lineno}: {called} starts work that chassis.runtime doesn't supervise"
        for node, called in calls(text)
        if called.split(".")[-1] in {*TASK_STARTERS, "TaskGroup", "Thread", "run_in_executor"}
    ]


def asks_the_process_clock(name: str, text: str) -> list[str]:
    """An instant is an argument, from the clock of chassis; monotonic time measures durations only."""
    wall_clocks = {"datetime.now", "datetime.utcnow", "date.today", "datetime.today", "time.time", "time.time_ns"}
    return [
        f"{name}:{node.lineno}: {called}() is the process's own clock; take `now` as an argument"
        for node, called in calls(text)
        if ".".join(called.split(".")[-2:]) in wall_clocks
    ]


def sleeps(name: str, text: str) -> list[str]:
    """A test moves the clock, or waits for a condition.

    Letting other tasks run (`sleep(0)`) is no waiting; a stand-in beside the tests may delay what it stands in for.
    """
    if not PurePosixPath(name).name.startswith(("test_", "conftest")):
        return []
    return [
        f"{name}:{node.lineno}: {called}() sleeps; move the clock, or wait with eventually() or broker.expect()"
        for node, called in calls(text)
        if called.split(".")[-1] == "sleep" and [ast.unparse(argument) for argument in node.args] != ["0"]
    ]


def badly_named(name: str, text: str) -> list[str]:
    """A name says what a thing is; the banned words say nothing."""
    parts = PurePosixPath(name).with_suffix("").parts
    found = [
        f"{name}: a file or folder is named {part}"
        for part in parts
        if BANNED_WORDS & set(part.removeprefix("test_").split("_"))
    ]
    return found + [
        f"{name}:{node.lineno}: {node.name} says nothing; name what is done"
        for node in ast.walk(parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.lstrip("_").startswith("process_")
        and node.name not in SQLALCHEMY_HOOKS
    ]


def silent_module(name: str, text: str) -> list[str]:
    """Every module says what it protects."""
    said = (ast.get_docstring(parse(text)) or "").strip()
    return [] if len(said) > 10 else [f"{name}: the module has no docstring"]


def undocumented(name: str, text: str) -> list[str]:
    """Every public name of a library is explained."""

    def public(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            if named and not child.name.startswith("_"):
                yield child, child.name
                if isinstance(child, ast.ClassDef):
                    yield from ((inner, f"{child.name}.{called}") for inner, called in public(child))

    return [
        f"{name}:{node.lineno}: {called} has no docstring"
        for node, called in public(parse(text))
        if ast.get_docstring(node) is None
    ]


def too_long(name: str, text: str) -> list[str]:
    """A file that passes about 400 lines becomes a package of the same name."""
    length = len(text.splitlines())
    return [f"{name}: {length} lines"] if length > LONGEST else []


SRC = ("libs/bizcal/src", CHASSIS, "libs/devstack/src", "services")
PRODUCT = ("libs/bizcal/src", CHASSIS, "services")
RULES: list[tuple[Rule, tuple[str, ...], str]] = [
    (commits_elsewhere, PRODUCT, ""),
    (kafka_clients_elsewhere, SRC, ""),
    (swallows_everything, SRC, ""),
    (loses_work, SRC, ""),
    (starts_work_of_its_own, ("services",), ""),
    (asks_the_process_clock, ("libs/bizcal/src", "services"), ""),
    (asks_the_process_clock, (CHASSIS,), f"{CHASSIS}/testing/"),
    (sleeps, ("tests",), ""),
    (badly_named, (*SRC, "tests"), ""),
    (silent_module, (*SRC, "tests"), ""),
    (undocumented, ("libs/bizcal/src", CHASSIS), ""),
    (too_long, SRC, ""),
]


@pytest.mark.parametrize(("rule", "folders", "but"), RULES, ids=[f"{rule[0].__name__} {rule[1][-1]}" for rule in RULES])
def test_the_repository_keeps_the_rule(rule, folders, but):
    files = {name: text for name, text in sources(*folders).items() if not but or not name.startswith(but)}
    assert files
    assert [sentence for name, text in files.items() for sentence in rule(name, text)] == []


CRM = "services/crm/src/crm/commands.py"
TEST = "tests/services/crm/test_deals.py"
BREACHES = [
    (commits_elsewhere, CRM, "async def f(session):\n    await session.commit()", ":2: session.commit() commits"),
    (commits_elsewhere, f"{CHASSIS}/relay.py", "connection.commit()", ":1: connection.commit() commits"),
    (commits_elsewhere, f"{CHASSIS}/migrations.py", "session.commit()", ":1: session.commit() commits"),
    (commits_elsewhere, CRM, 'e = engine.execution_options(isolation_level="AUTOCOMMIT")', ":1: AUTOCOMMIT commits"),
    (
        kafka_clients_elsewhere,
        CRM,
        "import json\nfrom aiokafka import AIOKafkaProducer",
        ":2: imports aiokafka.AIOKafka",
    ),
    (kafka_clients_elsewhere, f"{CHASSIS}/relay.py", "import aiokafka.errors as e", ":1: imports aiokafka.errors"),
    (swallows_everything, CRM, "try:\n    f()\nexcept Exception:\n    pass", ":3: catches everything"),
    (swallows_everything, CRM, "try:\n    f()\nexcept:\n    g()", ":3: catches everything"),
    (
        swallows_everything,
        CRM,
        "try:\n    f()\nexcept (OSError, BaseException) as e:\n    g(e)",
        ":3: catches everything",
    ),
    (swallows_everything, f"{CHASSIS}/relay.py", "with contextlib.suppress(Exception):\n    f()", ":1: suppresses"),
    (loses_work, CRM, "from fastapi import BackgroundTasks", ":1: BackgroundTasks is not used here"),
    (loses_work, CRM, "from starlette.middleware.base import BaseHTTPMiddleware", ":1: BaseHTTPMiddleware is not used"),
    (loses_work, CRM, "async def f():\n    asyncio.create_task(g())", ":2: the task is dropped"),
    (loses_work, CRM, "loop.create_task(g())", ":1: the task is dropped"),
    (starts_work_of_its_own, CRM, "task = asyncio.create_task(g())", ":1: asyncio.create_task starts work"),
    (starts_work_of_its_own, CRM, "threading.Thread(target=f).start()", ":1: threading.Thread starts work"),
    (asks_the_process_clock, CRM, "now = datetime.now(UTC)", ":1: datetime.now() is the process's own clock"),
    (
        asks_the_process_clock,
        CRM,
        "now = datetime.datetime.utcnow()",
        ":1: datetime.datetime.utcnow() is the process's",
    ),
    (asks_the_process_clock, CRM, "now = time.time()", ":1: time.time() is the process's own clock"),
    (sleeps, TEST, "import time\ntime.sleep(1)", ":2: time.sleep() sleeps"),
    (sleeps, TEST, "async def test():\n    await asyncio.sleep(0.1)", ":2: asyncio.sleep() sleeps"),
    (sleeps, TEST, "from time import sleep\nsleep(2)", ":2: sleep() sleeps"),
    (badly_named, "services/crm/src/crm/utils.py", "", ": a file or folder is named utils"),
    (badly_named, "services/crm/src/crm/data/deals.py", "", ": a file or folder is named data"),
    (badly_named, "tests/services/crm/deal_helpers.py", "", ": a file or folder is named deal_helpers"),
    (badly_named, CRM, "def process_deal(): ...", ":1: process_deal says nothing"),
    (silent_module, CRM, "import json", ": the module has no docstring"),
    (silent_module, CRM, '"""x"""', ": the module has no docstring"),
    (undocumented, f"{CHASSIS}/db.py", "class A:\n    '''Yes.'''\n    def f(self): ...", ":3: A.f has no docstring"),
    (undocumented, f"{CHASSIS}/db.py", "async def f(): ...", ":1: f has no docstring"),
    (too_long, CRM, "x = 1\n" * 401, ": 401 lines"),
]


@pytest.mark.parametrize(("rule", "name", "text", "said"), BREACHES, ids=[f"{b[0].__name__} {b[3]}" for b in BREACHES])
def test_a_breach_is_refused_with_its_place(rule, name, text, said):
    assert [sentence for sentence in rule(name, text) if sentence.startswith(name + said)]


ALLOWED = [
    (commits_elsewhere, f"{CHASSIS}/db.py", "session.commit()"),
    (kafka_clients_elsewhere, f"{CHASSIS}/messaging/kafka/group.py", "import aiokafka"),
    (swallows_everything, f"{CHASSIS}/web/envelope.py", "try:\n    f()\nexcept Exception:\n    pass"),
    (swallows_everything, CRM, "try:\n    f()\nexcept Exception:\n    g()\n    raise"),
    (loses_work, CRM, "tasks.append(asyncio.create_task(g()))"),
    (asks_the_process_clock, CRM, "now = await clock.now(session)\nstarted = time.monotonic()"),
    (sleeps, TEST, "async def test():\n    await asyncio.sleep(0)"),
    (sleeps, "tests/libs/chassis/slow_network.py", "await_ = asyncio.sleep(delay)"),
    (badly_named, "services/crm/src/crm/database.py", "class T:\n    def process_bind_param(self): ..."),
    (undocumented, f"{CHASSIS}/db.py", "def _f(): ...\nclass _A:\n    def f(self): ..."),
    (too_long, CRM, "x = 1\n" * 400),
]


@pytest.mark.parametrize(("rule", "name", "text"), ALLOWED, ids=[f"{a[0].__name__} {a[1][-14:]}" for a in ALLOWED])
def test_what_the_rule_allows_passes(rule, name, text):
    assert rule(name, text) == []
