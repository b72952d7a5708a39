"""Rules for SQL in source text: no clock of its own for business time, and every table with its schema.

SQL is read from the string constants of Python files (docstrings apart) and from .sql files.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHASSIS = "libs/chassis/src/chassis"
CLOCKS = re.compile(
    r"\b(?:(?:now|clock_timestamp|statement_timestamp|transaction_timestamp|timeofday)\s*\("
    r"|(?:current_timestamp|current_date|current_time|localtimestamp|localtime)\b)",
    re.IGNORECASE,
)
ALLOWED_CLOCKS = {
    f"{CHASSIS}/clock.py": "select clock_timestamp()",
    f"{CHASSIS}/outbox.py": "clock_timestamp()",
    f"{CHASSIS}/relay/watch.py": "select clock_timestamp() as at",
    "services/crm/migrations/versions/0001_deals_and_timeline.py": (
        "created_at timestamptz not null default clock_timestamp()"
    ),
    "services/chessboard/migrations/versions/0001_property_objects_and_holds.py": (
        "created_at timestamptz not null default clock_timestamp()"
    ),
}
"""Where the database's clock may be read: the process's clock itself, and the age of an outbox row."""

STATEMENT = re.compile(
    r"\b(?:select|insert into|delete from|create (?:table|index|policy)|alter table|update \S+ (?:as \w+ )?set)\s",
    re.IGNORECASE,
)
TABLE = re.compile(
    r"(?<!\bkey )(?<!\bno )(?<!\bdo )(?<!\bfor )\b"
    r"(?P<after>from|join|into|update|table|references|(?:index|policy) \w+ on)\s+"
    r"(?:(?:only|lateral|if (?:not )?exists)\s+)*(?P<name>[a-z_{\"][\w{}.\"]*)(?P<call>\s*\()?",
    re.IGNORECASE,
)
CTE = re.compile(
    r"(?:\bwith|,)\s+(?:recursive\s+)?(\w+)(?:\s*\([^)]*\))?\s+as\s+(?:not\s+materialized\s+)?\(", re.IGNORECASE
)
NOT_TABLES = {"set", "of"}


def strings(name: str, text: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of every string that could be SQL; an f-string's holes are `{}`."""
    if name.endswith(".sql"):
        yield 1, re.sub(r"--.*", "", text)
        return
    tree = ast.parse(text)
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr) and id(node) not in said:
            parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not {id(node)} & (said | inner):
            yield node.lineno, node.value


def clocks_in_sql(name: str, text: str) -> list[str]:
    """SQL never asks the time for business; `now` is a parameter."""
    allowed = ALLOWED_CLOCKS.get(name)
    found = [
        f"{name}:{line}: {match[0].strip(' (')} in SQL; pass the clock's instant"
        for line, sql in strings(name, text)
        for match in CLOCKS.finditer(sql.replace(allowed, "") if allowed else sql)
    ]
    if name.endswith(".py"):
        found += [
            f"{name}:{node.lineno}: {ast.unparse(node.func)}() asks the database's clock; pass the clock's instant"
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Call) and re.search(r"\bfunc\.\w*(now|timestamp)$", ast.unparse(node.func))
        ]
    return found


SESSION_STATE = re.compile(
    r"\bpg_(?:try_)?advisory_(?:lock|unlock)\w*\s*\(|\bset_config\s*\([^)]*,\s*false\s*\)"
    r"|^\s*(?:set\s+(?!local\b|transaction\b)\w+(?:\.\w+)?\s*(?:=|to\b)|listen\s+\w+\s*$|prepare\s+\w+\s+as\b"
    r"|create\s+temp(?:orary)?\b)",
    re.IGNORECASE,
)


def session_state(name: str, text: str) -> list[str]:
    """Behind a transaction pooler the next transaction is another client's: nothing outlives its transaction.

    Migrations are spared: they connect past the pooler.
    """
    if "/migrations" in name:
        return []
    return [
        f"{name}:{line}: {match[0].strip()} outlives its transaction; a pooler gives the connection to others"
        for line, sql in strings(name, text)
        for match in SESSION_STATE.finditer(sql)
    ]


def unqualified_tables(name: str, text: str) -> list[str]:
    """A table is named with its schema: what search_path says decides nothing."""
    sentences = []
    for line, sql in strings(name, text):
        if not STATEMENT.search(sql + " "):
            continue
        own = {match.lower() for match in CTE.findall(sql)}
        for match in TABLE.finditer(sql):
            table = match["name"].lower()
            is_function = match["call"] and match["after"].lower() in {"from", "join"}
            if "." in table or table.startswith(("{", "pg_")) or table in own | NOT_TABLES or is_function:
                continue
            place = line + sql[: match.start()].count("\n")
            sentences.append(f"{name}:{place}: {match['after']} {match['name']} names no schema")
    return sentences


def sources() -> dict[str, str]:
    """Return what holds SQL of the product: name -> text."""
    folders = [ROOT / "services", ROOT / CHASSIS, ROOT / "deploy" / "postgres"]
    paths = [path for folder in folders for path in sorted(folder.rglob("*")) if path.suffix in {".py", ".sql"}]
    testing = ROOT / CHASSIS / "testing"
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths if testing not in path.parents}


@pytest.mark.parametrize("rule", [clocks_in_sql, session_state, unqualified_tables], ids=lambda rule: rule.__name__)
def test_the_repository_keeps_the_rule(rule):
    assert [sentence for name, text in sources().items() for sentence in rule(name, text)] == []


@pytest.mark.parametrize("name", ALLOWED_CLOCKS)
def test_every_allowed_clock_is_still_there_and_the_only_one(name, monkeypatch):
    text = (ROOT / name).read_text()
    monkeypatch.delitem(ALLOWED_CLOCKS, name)
    assert len(clocks_in_sql(name, text)) == 1


CRM = "services/crm/src/crm/queries.py"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('_DUE = "select id from crm.deal where due_at < now()"', ":1: now in SQL"),
        ('_DUE = text("update crm.deal set updated_at = CURRENT_TIMESTAMP")', ":1: CURRENT_TIMESTAMP in SQL"),
        ('\n_DUE = f"select {x} where at < clock_timestamp () - {y}"', ":2: clock_timestamp in SQL"),
        ("row.at = func.now()", ":1: func.now() asks the database's clock"),
        ("row.at = sa.func.current_timestamp()", ":1: sa.func.current_timestamp() asks the database's clock"),
    ],
)
def test_sql_that_asks_the_time_is_refused(text, said):
    assert [sentence for sentence in clocks_in_sql(CRM, text) if sentence.startswith(CRM + said)]


def test_a_default_of_a_new_column_that_asks_the_time_is_refused():
    migration = "services/crm/migrations/versions/0002_more.py"
    text = 'def upgrade():\n    op.execute("alter table crm.deal add seen_at timestamptz default now()")'
    assert clocks_in_sql(migration, text) == [f"{migration}:2: now in SQL; pass the clock's instant"]


@pytest.mark.parametrize(
    "text",
    [
        'def f(now):\n    """Return what is due (now() is never asked)."""\n    return clock.now(session)',
        '_DUE = "select id from crm.deal where due_at < :now"',
        'message = "nothing happens now"',
    ],
)
def test_text_that_only_speaks_of_now_passes(text):
    assert clocks_in_sql(CRM, text) == []


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("select id from deal", ":1: from deal"),
        ("select d.id from crm.deal d join deal_timeline_event s on s.deal_id = d.id", ":1: join deal_timeline_event"),
        ("insert into outbox (id) values (1)", ":1: into outbox"),
        ("update deal set title = :title", ":1: update deal"),
        ("delete from {} where id = 1 and x in (select id from audit_log)", ":1: from audit_log"),
        ("with due as (\\n select id from deal\\n) select id from due", ":2: from deal"),
        ("create table deal (id uuid primary key)", ":1: table deal"),
        ("alter table crm.step add foreign key (deal_id) references deal (id)", ":1: references deal"),
        ("create index ix_deal on deal (id)", ":1: index ix_deal on deal"),
    ],
)
def test_a_table_without_schema_is_refused(sql, said):
    assert f"{CRM}{said} names no schema" in unqualified_tables(CRM, f'_SQL = "{sql}"')


@pytest.mark.parametrize(
    "sql",
    [
        "with due as (select 1), late(id) as (select id from due) select id from late",
        "select id from unnest($1::uuid[]) as u(id)",
        "select x from {schema}.outbox join {table} t on true for update of t skip locked",
        "insert into crm.job_poison as p (id) values (1) on conflict (id) do update set failures = 2",
        "select extract(epoch from clock_timestamp())",
        "select a is distinct from b.c, d from (select 1 as d) as e",
        "no open step from the deal into nothing",
    ],
)
def test_what_names_a_schema_or_no_table_passes(sql):
    assert unqualified_tables(CRM, f"_SQL = {sql!r}") == []


@pytest.mark.parametrize(
    "sql",
    [
        "select pg_advisory_lock(1)",
        "select pg_try_advisory_lock(hashtext('crm.outbox'), $1)",
        "select pg_advisory_unlock_all()",
        "select set_config('app.tenant', :tenant, false)",
        "set lock_timeout = '1s'",
        "SET plan_cache_mode TO force_custom_plan",
        "listen outbox",
        "create temp table x (id int)",
    ],
)
def test_what_outlives_its_transaction_is_refused(sql):
    (said,) = session_state(CRM, f'_SQL = "{sql}"')
    assert said.startswith(f"{CRM}:1: ")
    assert "outlives its transaction" in said


@pytest.mark.parametrize(
    "sql",
    [
        "select pg_try_advisory_xact_lock(1)",
        "select set_config('app.tenant', :tenant, true)",
        "set local lock_timeout = '1s'",
        "update crm.deal set title = 'x'",
    ],
)
def test_what_ends_with_its_transaction_passes(sql):
    assert session_state(CRM, f'_SQL = "{sql}"') == []


def test_sql_files_are_read_too():
    text = "-- create table old (id int);\ncreate table deal (id int default now());\n"
    assert unqualified_tables("deploy/postgres/roles.sql", text) == [
        "deploy/postgres/roles.sql:2: table deal names no schema"
    ]
    assert len(clocks_in_sql("deploy/postgres/roles.sql", text)) == 1
