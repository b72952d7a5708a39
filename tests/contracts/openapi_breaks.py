"""What a change of an OpenAPI document breaks for those who call by the old one.

A request may become wider and a response narrower; the other way round somebody's program stops working. Additions that
nobody must know of (paths, optional fields and parameters, response fields, refusals) break nothing.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import orjson

Schema = Mapping[str, Any]
Document = Mapping[str, Any]
_LOWER: Final = ("minLength", "minimum", "exclusiveMinimum", "minItems")
_UPPER: Final = ("maxLength", "maximum", "exclusiveMaximum", "maxItems")
_FORMS: Final = ("format", "pattern")


def breaks(old: Document, new: Document) -> list[str]:
    """Return one sentence per promise of the old document that the new one breaks."""
    found: list[str] = []
    for path, methods in old.get("paths", {}).items():
        for method, operation in methods.items():
            place = f"{method.upper()} {path}"
            other = new.get("paths", {}).get(path, {}).get(method)
            if other is None:
                found.append(f"{place}: removed")
            else:
                found += [f"{place}: {what}" for what in _Comparison(old, new).operation(operation, other)]
    return found


class _Comparison:
    def __init__(self, old: Document, new: Document) -> None:
        self._documents = (old, new)
        self._under_way: set[tuple[str, str, bool]] = set()

    def operation(self, old: Schema, new: Schema) -> Iterator[str]:
        for name in ("x-required-scope", "x-required-role"):
            if old.get(name) != new.get(name):
                yield f"{name} was {old.get(name)} and is {new.get(name)}"
        yield from self._parameters(old, new)
        yield from self._request(old.get("requestBody"), new.get("requestBody"))
        for status, answer in old.get("responses", {}).items():
            other = new.get("responses", {}).get(status)
            if other is None:
                yield f"answer {status} removed"
            else:
                yield from self._answer(status, self._resolved(answer, 0), self._resolved(other, 1))

    def _parameters(self, old: Schema, new: Schema) -> Iterator[str]:
        before, after = ({(p["in"], p["name"]): p for p in side.get("parameters", ())} for side in (old, new))
        for key, parameter in before.items():
            place = f"{key[0]} parameter {key[1]}"
            if key not in after:
                yield f"{place} removed"
                continue
            if after[key].get("required") and not parameter.get("required"):
                yield f"{place} became required"
            yield from self._schema(place, parameter.get("schema", {}), after[key].get("schema", {}), request=True)
        for key, parameter in after.items():
            if key not in before and parameter.get("required"):
                yield f"{key[0]} parameter {key[1]} is new and required"

    def _request(self, old: Schema | None, new: Schema | None) -> Iterator[str]:
        if new is not None and new.get("required") and not (old or {}).get("required"):
            yield "the request body became required"
        if old is not None and new is None:
            yield "the request body was removed"
        if old is None or new is None:
            return
        for kind, content in old.get("content", {}).items():
            if kind not in new.get("content", {}):
                yield f"request bodies of {kind} are no longer taken"
            else:
                yield from self._schema("request", content["schema"], new["content"][kind]["schema"], request=True)

    def _answer(self, status: str, old: Schema, new: Schema) -> Iterator[str]:
        for name in old.get("headers", {}):
            if name not in new.get("headers", {}):
                yield f"answer {status}: header {name} removed"
        for kind, content in old.get("content", {}).items():
            if kind not in new.get("content", {}):
                yield f"answer {status} is no longer {kind}"
            else:
                after = new["content"][kind].get("schema", {})
                yield from self._schema(f"answer {status}", content.get("schema", {}), after, request=False)

    def _resolved(self, schema: Schema, side: int) -> Schema:
        while "$ref" in schema:
            found: Any = self._documents[side]
            for part in schema["$ref"].removeprefix("#/").split("/"):
                found = found[part]
            schema = found
        return schema

    def _schema(self, place: str, old: Schema, new: Schema, *, request: bool) -> Iterator[str]:
        names = (old.get("$ref", ""), new.get("$ref", ""), request)
        if names[0] and names[1]:
            if names in self._under_way:
                return
            self._under_way.add(names)
        before, after = self._variants(old, 0), self._variants(new, 1)
        types = [{kind for variant in side for kind in _types(variant)} for side in (before, after)]
        wider, narrower = (types[1], types[0]) if request else (types[0], types[1])
        if not ("any" in wider or narrower <= wider):
            yield f"{place}: type was {_listed(types[0])} and is {_listed(types[1])}"
            return
        plain = [[variant for variant in side if variant.get("type") != "null"] for side in (before, after)]
        if len(plain[0]) == len(plain[1]) == 1:
            yield from self._one(place, plain[0][0], plain[1][0], request=request)
        elif plain[0] and plain[1]:
            texts = [{orjson.dumps(variant, option=orjson.OPT_SORT_KEYS) for variant in side} for side in plain]
            if not (texts[0] <= texts[1] if request else texts[1] <= texts[0]):
                yield f"{place}: its variants changed"

    def _variants(self, schema: Schema, side: int) -> list[Schema]:
        schema = self._resolved(schema, side)
        choices = schema.get("anyOf") or schema.get("oneOf")
        if not choices:
            return [schema]
        return [variant for choice in choices for variant in self._variants(choice, side)]

    def _one(self, place: str, old: Schema, new: Schema, *, request: bool) -> Iterator[str]:
        yield from _values(place, old, new, request=request)
        yield from _bounds(place, old, new, request=request)
        if "items" in old and "items" in new:
            yield from self._schema(f"{place}[]", old["items"], new["items"], request=request)
        fields, others = old.get("properties", {}), new.get("properties", {})
        must, must_now = set(old.get("required", ())), set(new.get("required", ()))
        for name, field in fields.items():
            if name not in others:
                yield f"{place}.{name} removed"
            else:
                yield from self._schema(f"{place}.{name}", field, others[name], request=request)
        if request:
            yield from (f"{place}.{name} became required" for name in sorted(must_now - must))
            if new.get("additionalProperties") is False and old.get("additionalProperties") is not False:
                yield f"{place}: unknown fields are no longer taken"
        else:
            yield from (f"{place}.{name} may be absent now" for name in sorted((must - must_now) & set(others)))


def _types(schema: Schema) -> set[str]:
    kind = schema.get("type")
    if kind is None:
        return {"object"} if "properties" in schema else {"any"} if "enum" not in schema else {"string"}
    kinds = {kind} if isinstance(kind, str) else set(kind)
    return kinds | {"integer"} if "number" in kinds else kinds


def _values(place: str, old: Schema, new: Schema, *, request: bool) -> Iterator[str]:
    before, after = (
        None if "enum" not in side and "const" not in side else set(map(str, side.get("enum", [side.get("const")])))
        for side in (old, new)
    )
    accepted, given = (after, before) if request else (before, after)
    if accepted is not None and (given is None or not given <= accepted):
        yield f"{place}: values were {_listed(before)} and are {_listed(after)}"


def _bounds(place: str, old: Schema, new: Schema, *, request: bool) -> Iterator[str]:
    outer, inner = (new, old) if request else (old, new)
    for name in (*_LOWER, *_UPPER):
        if name in outer:
            sign = 1 if name in _LOWER else -1
            if name not in inner or sign * inner[name] < sign * outer[name]:
                yield f"{place}: {name} was {old.get(name)} and is {new.get(name)}"
    for name in _FORMS:
        if name in outer and inner.get(name) != outer[name]:
            yield f"{place}: {name} was {old.get(name)} and is {new.get(name)}"


def _listed(values: set[str] | None) -> str:
    return "anything" if values is None else ", ".join(sorted(values))
