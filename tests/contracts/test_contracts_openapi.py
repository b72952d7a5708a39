"""The HTTP contract: files are what the code answers, released promises are kept, every error code is in one list."""

import ast
import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from openapi_breaks import breaks
from openapi_snapshots import FOLDER, ROOT, application, services, snapshots, stale

from chassis.problems import CODES, MEDIA_TYPE, ErrorAnswer, codes_of

Change = Callable[[dict[str, Any]], Any]


def released(service: str) -> dict[str, Any]:
    return orjson.loads((FOLDER / "released" / f"{service}.json").read_bytes())


def test_the_files_are_what_the_code_answers():
    assert stale(FOLDER, snapshots()) == []


def test_a_stale_file_is_refused_and_the_sentence_says_how_to_renew_it(tmp_path: Path):
    files = snapshots()
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    assert stale(tmp_path, files) == []
    (tmp_path / "crm.json").write_bytes(files["crm.json"].replace(b"deal", b"deed", 1))
    (tmp_path / "errors.md").unlink()
    assert len(stale(tmp_path, files)) == 2
    assert all("`make openapi`" in sentence for sentence in stale(tmp_path, files))


@pytest.mark.parametrize("service", services())
def test_what_was_released_still_holds(service: str):
    assert breaks(released(service), orjson.loads(snapshots()[f"{service}.json"])) == []


# Breaks, each seen.


def at(document: dict[str, Any], path: str, method: str) -> dict[str, Any]:
    return document["paths"][path][method]


def schema(document: dict[str, Any], name: str) -> dict[str, Any]:
    return document["components"]["schemas"][name]


DEALS, DEAL, STEPS = "/v1/deals", "/v1/deals/{deal_id}", "/v1/deals/{deal_id}/timeline"
LIMIT, AFTER, STATUS = 0, 1, 2


def new_parameter(document: dict[str, Any], **fields: Any) -> None:
    at(document, DEALS, "get")["parameters"].append({"in": "query", "name": "new", "schema": {}} | fields)


def parameter(document: dict[str, Any], name: str) -> dict[str, Any]:
    return next(p for p in at(document, DEALS, "get")["parameters"] if p["name"] == name)


BREAKS: dict[str, tuple[Change, str]] = {
    "path removed": (lambda d: d["paths"].pop(DEAL), f"GET {DEAL}: removed"),
    "method removed": (lambda d: d["paths"][DEALS].pop("post"), f"POST {DEALS}: removed"),
    "status removed": (lambda d: at(d, DEALS, "post")["responses"].pop("201"), "answer 201 removed"),
    "refusal removed": (lambda d: at(d, DEALS, "post")["responses"].pop("409"), "answer 409 removed"),
    "another scope": (lambda d: at(d, DEALS, "get").update({"x-required-scope": "crm:all"}), "x-required-scope was"),
    "a role": (lambda d: at(d, DEALS, "get").update({"x-required-role": "admin"}), "x-required-role was None"),
    "required parameter": (lambda d: new_parameter(d, required=True), "query parameter new is new and required"),
    "parameter removed": (lambda d: at(d, DEALS, "get")["parameters"].remove(parameter(d, "status")), "status removed"),
    "parameter required": (lambda d: parameter(d, "after").update(required=True), "after became required"),
    "parameter's bound": (lambda d: parameter(d, "limit")["schema"].update(maximum=100), "maximum was 200"),
    "parameter's type": (lambda d: parameter(d, "limit").update(schema={"type": "string"}), "type was integer"),
    "new required field": (
        lambda d: schema(d, "OpenDeal").update(required=["title", "price"]), "request.price became required",
    ),
    "field required": (lambda d: schema(d, "AddStep")["required"].append("dueAt"), "request.dueAt became required"),
    "request field removed": (lambda d: schema(d, "AddStep")["properties"].pop("payload"), "payload removed"),
    "request enum narrowed": (lambda d: schema(d, "DealTimelineEventType")["enum"].pop(), "request.type: values were"),
    "request type narrowed": (
        lambda d: schema(d, "AddStep")["properties"].update(dueAt={"type": "string", "format": "date-time"}),
        "request.dueAt: type was null, string",
    ),
    "request length": (lambda d: schema(d, "OpenDeal")["properties"]["title"].update(maxLength=100), "maxLength was"),
    "request least length": (lambda d: schema(d, "OpenDeal")["properties"]["title"].update(minLength=5), "minLength"),
    "request pattern": (lambda d: schema(d, "OpenDeal")["properties"]["title"].update(pattern="^F"), "pattern was"),
    "body required": (lambda d: at(d, f"{DEAL}/complete", "post").update(
        requestBody={"required": True, "content": {}}), "the request body became required"),
    "answer's field removed": (lambda d: schema(d, "DealView")["properties"].pop("version"), "version removed"),
    "answer's field optional": (lambda d: schema(d, "DealView")["required"].remove("title"), "title may be absent now"),
    "answer's type widened": (
        lambda d: schema(d, "DealView")["properties"].update(version={"type": ["integer", "string"]}),
        "version: type was integer and is integer, string",
    ),
    "answer's null": (
        lambda d: schema(d, "DealView")["properties"].update(title={"anyOf": [{"type": "string"}, {"type": "null"}]}),
        "title: type was string and is null, string",
    ),
    "answer's enum widened": (lambda d: schema(d, "StepStatus")["enum"].append("Lost"), "status: values were"),
    "answer's form": (lambda d: schema(d, "DealView")["properties"]["id"].pop("format"), "format was uuid and is None"),
    "deep in a list": (
        lambda d: schema(d, "StepView")["properties"].pop("icon"), "answer 200.items[].icon removed",
    ),
    "problem's field": (lambda d: schema(d, "Problem")["properties"].pop("code"), "code removed"),
    "kind of answer": (lambda d: d["components"]["responses"]["Problem404"].update(
        content={"application/json": {"schema": {}}}), f"answer 404 is no longer {MEDIA_TYPE}"),
}  # fmt: skip
ADDITIONS: dict[str, Change] = {
    "nothing": lambda d: None,
    "path": lambda d: d["paths"].update({"/v1/bookings": {"get": {"responses": {}}}}),
    "method": lambda d: d["paths"][DEALS].update({"delete": {"responses": {}}}),
    "optional parameter": new_parameter,
    "optional field": lambda d: schema(d, "OpenDeal")["properties"].update(note={"type": "string"}),
    "answer's field": lambda d: schema(d, "DealView")["properties"].update(note={"type": "string"}),
    "answer's required field": lambda d: (
        schema(d, "DealView")["properties"].update(note={"type": "string"}),
        schema(d, "DealView")["required"].append("note"),
    ),
    "refusal": lambda d: at(d, DEALS, "get")["responses"].update({"418": {"description": "tea"}}),
    "longer text taken": lambda d: schema(d, "OpenDeal")["properties"]["title"].update(maxLength=500),
    "more values taken": lambda d: parameter(d, "limit")["schema"].update(maximum=500),
    "field no longer required": lambda d: schema(d, "AddStep")["required"].remove("occurredAt"),
    "fewer values answered": lambda d: schema(d, "StepStatus")["enum"].remove("Overdue"),
    "descriptions": lambda d: at(d, DEALS, "get").update(description="Other words.", summary="Other"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_break_is_refused_with_its_place(name: str):
    change, said = BREAKS[name]
    new = copy.deepcopy(released("crm"))
    change(new)
    found = breaks(released("crm"), new)
    assert [sentence for sentence in found if said in sentence], found


@pytest.mark.parametrize("name", ADDITIONS)
def test_an_addition_is_allowed(name: str):
    new = copy.deepcopy(released("crm"))
    ADDITIONS[name](new)
    assert breaks(released("crm"), new) == []


# Documents.


@pytest.mark.parametrize("service", services())
def test_every_refusal_is_declared_as_a_problem_document(service: str):
    document = application(services()[service]).openapi()
    operations = [(f"{m} {p}", o) for p, methods in document["paths"].items() for m, o in methods.items()]
    assert operations
    for name, operation in operations:
        refusals = {s: a for s, a in operation["responses"].items() if s >= "400"}
        assert {"401", "403", "422", "429", "503"} <= set(refusals), name
        for status, answer in refusals.items():
            declared = document["components"]["responses"][answer["$ref"].rpartition("/")[2]]
            assert list(declared["content"]) == [MEDIA_TYPE], f"{name} {status}"
            assert "`" in declared["description"], f"{name} {status} names no code"
        assert operation["x-required-scope"], name
    assert "HTTPValidationError" not in document["components"]["schemas"]


def test_what_a_route_takes_decides_what_it_may_refuse():
    document = application("crm").openapi()
    complete = at(document, f"{DEAL}/complete", "post")["responses"]
    assert {"404", "409", "412"} <= set(complete)
    assert not {"404", "409", "412", "413"} & set(at(document, DEALS, "get")["responses"])
    assert {"400", "413"} <= set(at(document, DEALS, "post")["responses"])


# Codes.


def codes_in(text: str) -> list[tuple[str | None, Any]]:
    """Return (code, status) of every problem that a source makes; None where they are not written out."""
    found: list[tuple[str | None, Any]] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in {"Problem", "ErrorAnswer"}:
            status, code = (value.value if isinstance(value, ast.Constant) else None for value in node.args[:2])
            found.append((code, status))
    return found


def strange_codes(text: str, known: dict[str, Any]) -> list[str]:
    """Return the codes of a source that are in no list, or come with another status than listed."""
    return [
        f"{code} with {status}"
        for code, status in codes_in(text)
        if code is not None and (code not in known or known[code].status not in (None, status))
    ]


def all_codes() -> dict[str, Any]:
    return {
        name: code for package in services().values() for name, code in application(package).state.problem_codes.items()
    }


def test_every_code_that_a_route_can_answer_is_in_the_list():
    folders = [ROOT / "libs/chassis/src", ROOT / "services"]
    sources = {path: path.read_text() for folder in folders for path in folder.rglob("*.py")}
    known = all_codes()
    assert {p.name: strange_codes(text, known) for p, text in sources.items() if strange_codes(text, known)} == {}
    written = {code for text in sources.values() for code, _ in codes_in(text)}
    assert set(known) - written == set(), "and the list names no code that nobody answers"


def test_a_code_that_is_in_no_list_is_found():
    assert strange_codes('Problem(409, "surprise", "?")', all_codes()) == ["surprise with 409"]
    assert strange_codes('Problem(400, "forbidden", "?")', all_codes()) == ["forbidden with 400"]
    assert strange_codes('return web.Problem(403, "forbidden", "?")', all_codes()) == []


def test_one_code_has_one_status():
    class Refused(Exception):
        """Somebody is refused."""

    with pytest.raises(ValueError, match="forbidden has the statuses 403 and 409"):
        codes_of({Refused: ErrorAnswer(409, "forbidden")})
    assert codes_of({Refused: ErrorAnswer(409, "refused")})["refused"].meaning == "Somebody is refused."


def test_codes_are_words_and_have_a_meaning():
    for name, code in all_codes().items():
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*|[A-Z]+(_[A-Z]+)*", name), name
        assert code.meaning.endswith("."), name
    assert set(CODES) <= set(all_codes())
