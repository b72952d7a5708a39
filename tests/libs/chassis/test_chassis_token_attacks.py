"""Tokens that somebody made to get in, over HTTP: each is a 401 problem that says how to authenticate."""

import base64
import hmac
import time
from collections.abc import Callable
from typing import Annotated, Any
from uuid import UUID

import httpx
import orjson
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from fastapi import Depends
from joserfc import jwe, jwt
from joserfc.jwk import ECKey, OctKey, OKPKey, RSAKey
from prometheus_client import CollectorRegistry

from chassis.identity import LONGEST_TOKEN, Principal, TokenVerifier
from chassis.settings import JwtIssuer
from chassis.web import Router, create_app, principal_with

TENANT = str(UUID(int=1))
OURS = OKPKey.generate_key("Ed25519", {"kid": "same"})
THEIRS = OKPKey.generate_key("Ed25519", {"kid": "same"})
RSA = RSAKey.generate_key(2048, {"kid": "rsa"})
MIXED = [ECKey.generate_key("P-256", {"kid": f"ec{n}"}) for n in range(2)]
STRANGER = OKPKey.generate_key("Ed25519", {"kid": "same"})


def issuer(name: str, algorithm: str, *keys: Any) -> JwtIssuer:
    jwks = {"keys": [key.as_dict(private=False) for key in keys]}
    return JwtIssuer(issuer=name, audience="pin", algorithms=[algorithm], jwks=jwks)


VERIFIER = TokenVerifier(
    [issuer("ours", "Ed25519", OURS), issuer("theirs", "Ed25519", THEIRS), issuer("rsa", "RS256", RSA),
     issuer("mixed", "ES256", *MIXED)]
)  # fmt: skip
router = Router()


@router.get("/who")
async def who(caller: Annotated[Principal, Depends(principal_with("any"))]) -> str:
    return caller.subject


def claims(**changes: Any) -> dict[str, Any]:
    now = int(time.time())
    full = {"iss": "ours", "aud": "pin", "sub": "u", "iat": now, "exp": now + 60, "tenant_id": TENANT, "scope": "any"}
    return {name: value for name, value in (full | changes).items() if value is not None}


def encoded(part: Any) -> str:
    raw = part if isinstance(part, bytes) else orjson.dumps(part)
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def by_hand(header: Any, body: Any, key: OKPKey = OURS) -> str:
    """Return a token with a good signature over whatever header and payload (bytes, or an object)."""
    head = f"{encoded(header)}.{encoded(body)}"
    return f"{head}.{encoded(key.private_key.sign(head.encode()))}"


HEADER = {"alg": "Ed25519", "kid": "same", "typ": "JWT"}


def body_text(**raw: str) -> bytes:
    """Return claims as JSON text, some of them written as given (which no JSON library would write)."""
    text = orjson.dumps(claims(**{name: f"@{name}@" for name in raw})).decode()
    for name, value in raw.items():
        text = text.replace(f'"@{name}@"', value)
    return text.encode()


def nameless(key: ECKey) -> ECKey:
    """Return a key without its id, so that the library writes none into the header."""
    return ECKey.import_key({name: value for name, value in key.as_dict(private=True).items() if name != "kid"})


def good(**changes: Any) -> str:
    return by_hand(HEADER, claims(**changes))


def confused_with_hmac(form: bytes) -> str:
    head = f"{encoded({'alg': 'HS256', 'kid': 'rsa'})}.{encoded(claims(iss='rsa'))}"
    return f"{head}.{encoded(hmac.digest(form, head.encode(), 'sha256'))}"


def encrypted() -> str:
    algorithms = ["dir", "A128GCM"]
    registry = jwe.JWERegistry(algorithms=algorithms)
    header = {"alg": "dir", "enc": "A128GCM", "typ": "JWT"}
    return jwt.encode(header, claims(), OctKey.generate_key(128), algorithms=algorithms, registry=registry)


PEM = RSA.public_key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
DER = RSA.public_key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
NOW = int(time.time())
ATTACKS: dict[str, Callable[[], str]] = {
    "alg none": lambda: f"{encoded({'alg': 'none'})}.{encoded(claims())}.",
    "alg none, a signature": lambda: by_hand(HEADER | {"alg": "none"}, claims()),
    "alg NoNe": lambda: f"{encoded({'alg': 'NoNe'})}.{encoded(claims())}.AAAA",
    "alg missing": lambda: by_hand({"kid": "same"}, claims()),
    "alg null": lambda: by_hand(HEADER | {"alg": None}, claims()),
    "alg a list": lambda: by_hand(HEADER | {"alg": ["Ed25519"]}, claims()),
    "alg twice": lambda: by_hand(b'{"alg":"none","alg":"Ed25519","kid":"same"}', claims()),
    "HS256 with the public key as PEM": lambda: confused_with_hmac(PEM),
    "HS256 with the public key as DER": lambda: confused_with_hmac(DER),
    "HS256 with an empty key": lambda: confused_with_hmac(b""),
    "wrong issuer, right key": lambda: good(iss="somebody"),
    "issuer with a slash more": lambda: good(iss="ours/"),
    "issuer missing": lambda: good(iss=None),
    "issuer a list": lambda: good(iss=["ours"]),
    "issuer an object": lambda: good(iss={"ours": 1}),
    "other issuer's key, same kid": lambda: by_hand(HEADER, claims(iss="theirs")),
    "our name, other issuer's key, same kid": lambda: by_hand(HEADER, claims(), THEIRS),
    "key of a stranger": lambda: by_hand(HEADER, claims(), STRANGER),
    "algorithm of another issuer": lambda: jwt.encode(
        {"alg": "RS256", "kid": "rsa"}, claims(), RSA, algorithms=["RS256"]
    ),
    "algorithm that this issuer doesn't use": lambda: jwt.encode(
        {"alg": "PS256", "kid": "rsa"}, claims(iss="rsa"), RSA, algorithms=["PS256"]
    ),
    "key in the header": lambda: by_hand(HEADER | {"jwk": STRANGER.as_dict(private=False)}, claims(), STRANGER),
    "key address in the header": lambda: by_hand(HEADER | {"jku": "http://127.0.0.1:1/k"}, claims(), STRANGER),
    "certificate address in the header": lambda: by_hand(HEADER | {"x5u": "http://127.0.0.1:1"}, claims(), STRANGER),
    "certificate in the header": lambda: by_hand(HEADER | {"x5c": [encoded(DER)]}, claims(), STRANGER),
    "kid a path": lambda: by_hand(HEADER | {"kid": "../../../../dev/null"}, claims(), STRANGER),
    "kid SQL": lambda: by_hand(HEADER | {"kid": "x' union select 'key' --"}, claims(), STRANGER),
    "kid with NUL": lambda: by_hand(HEADER | {"kid": "same\0"}, claims(), STRANGER),
    "kid a number": lambda: by_hand(HEADER | {"kid": 7}, claims()),
    "kid null": lambda: by_hand(HEADER | {"kid": None}, claims()),
    "kid an object": lambda: by_hand(HEADER | {"kid": {"a": 1}}, claims()),
    "kid very long": lambda: by_hand(HEADER | {"kid": "x" * 3000}, claims()),
    "kid unknown": lambda: by_hand(HEADER | {"kid": "other"}, claims()),
    "no kid where there are two keys": lambda: jwt.encode(
        {"alg": "ES256"}, claims(iss="mixed"), nameless(MIXED[0]),
        algorithms=["ES256"]
    ),
    "token of another type": lambda: by_hand(HEADER | {"typ": "logout+jwt"}, claims()),
    "type an object": lambda: by_hand(HEADER | {"typ": {}}, claims()),
    "crit unknown": lambda: by_hand(HEADER | {"crit": ["x"], "x": 1}, claims()),
    "crit exp": lambda: by_hand(HEADER | {"crit": ["exp"], "exp": 1}, claims()),
    "crit empty": lambda: by_hand(HEADER | {"crit": []}, claims()),
    "b64 false": lambda: by_hand(HEADER | {"crit": ["b64"], "b64": False}, claims()),
    "b64 false, not critical": lambda: by_hand(HEADER | {"b64": False}, claims()),
    "encrypted": encrypted,
    "signature stripped": lambda: good().rsplit(".", 1)[0] + ".",
    "signature part stripped": lambda: good().rsplit(".", 1)[0],
    "signature of zeros": lambda: good().rsplit(".", 1)[0] + "." + encoded(bytes(64)),
    "signature cut": lambda: good()[:-4],
    "signature with more": lambda: good() + "AAAA",
    "signature of another token": lambda: good(sub="v").rsplit(".", 1)[0] + "." + good().rsplit(".", 1)[1],
    "a part too many": lambda: good() + ".AAAA",
    "padding": lambda: good() + "==",
    "blank inside": lambda: good().replace(".", ". "),
    "tab inside": lambda: good().replace(".", ".\t"),
    "other base64 alphabet": lambda: good()[:-3] + "+/A",
    "half of it twice": lambda: good() + "," + good(),
    "huge": lambda: by_hand(HEADER, claims(junk="x" * LONGEST_TOKEN)),
    "JSON bomb in the payload": lambda: by_hand(HEADER, b"[" * 5000),
    "object bomb in the payload": lambda: by_hand(HEADER, b'{"a":' * 1100),
    "JSON bomb in the header": lambda: by_hand(b'{"a":' * 1000, claims()),
    "a number of 5000 digits": lambda: by_hand(HEADER, body_text(exp="9" * 5000)),
    "payload a list": lambda: by_hand(HEADER, [claims()]),
    "payload no UTF-8": lambda: by_hand(HEADER, b'{"iss": "\xff"}'),
    "payload with half a pair": lambda: by_hand(HEADER, body_text(sub='"\\ud800"')),
    "payload with NUL": lambda: by_hand(HEADER, body_text(sub='"a\\u0000b"')),
    "header a list": lambda: by_hand([HEADER], claims()),
    "header empty": lambda: by_hand({}, claims()),
    "claim twice": lambda: by_hand(HEADER, orjson.dumps(claims())[:-1] + b',"sub":"admin"}'),
    "tenant twice": lambda: by_hand(HEADER, orjson.dumps(claims())[:-1] + b',"tenant_id":"' + TENANT.encode() + b'"}'),
    "expired": lambda: good(exp=NOW - 3600),
    "exp missing": lambda: good(exp=None),
    "exp text": lambda: good(exp=str(NOW + 60)),
    "exp NaN": lambda: by_hand(HEADER, body_text(exp="NaN")),
    "exp Infinity": lambda: by_hand(HEADER, body_text(exp="Infinity")),
    "exp 1e999": lambda: by_hand(HEADER, body_text(exp="1e999")),
    "exp true": lambda: good(exp=True),
    "exp a list": lambda: good(exp=[NOW + 60]),
    "exp negative": lambda: good(exp=-1),
    "nbf in the future": lambda: good(nbf=NOW + 3600),
    "nbf text": lambda: good(nbf="now"),
    "nbf NaN": lambda: by_hand(HEADER, body_text(nbf="NaN")),
    "iat in the future": lambda: good(iat=NOW + 3600),
    "iat text": lambda: good(iat="yesterday"),
    "iat 1e999": lambda: by_hand(HEADER, body_text(iat="1e999")),
    "aud other": lambda: good(aud="other"),
    "aud list of others": lambda: good(aud=["other", "another"]),
    "aud empty list": lambda: good(aud=[]),
    "aud missing": lambda: good(aud=None),
    "aud an object": lambda: good(aud={"pin": 1}),
    "aud a list in a list": lambda: good(aud=[["pin"]]),
    "aud longer": lambda: good(aud="pin-admin"),
    "tenant missing": lambda: good(tenant_id=None),
    "tenant empty": lambda: good(tenant_id=""),
    "tenant no id": lambda: good(tenant_id="*"),
    "tenant a number": lambda: good(tenant_id=1),
    "tenant a list": lambda: good(tenant_id=[TENANT]),
    "partner no id": lambda: good(partner_id="p"),
    "partner a list": lambda: good(partner_id=[TENANT]),
    "roles text": lambda: good(roles="platform-admin"),
    "roles a number": lambda: good(roles=7),
    "roles an object": lambda: good(roles={"platform-admin": True}),
    "roles of objects": lambda: good(roles=[{"name": "ADMIN"}]),
    "role that is two": lambda: good(roles=["MANAGER,platform-admin"]),
    "role with a blank": lambda: good(roles=["MANAGER ADMIN"]),
    "roles without end": lambda: good(roles=["R"] * 51),
    "scope a list": lambda: good(scope=["any"]),
    "scope a number": lambda: good(scope=7),
    "sub missing": lambda: good(sub=None),
    "sub empty": lambda: good(sub=""),
    "sub blank": lambda: good(sub=" "),
    "sub a number": lambda: good(sub=7),
    "sub a list": lambda: good(sub=["u"]),
    "sub too long": lambda: good(sub="u" * 256),
    "sub with a line break": lambda: good(sub="u\nadmin"),
}  # fmt: skip
ACCEPTED: dict[str, Callable[[], str]] = {
    "plain": good,
    "without typ": lambda: by_hand({"alg": "Ed25519", "kid": "same"}, claims()),
    "at+jwt": lambda: by_hand(HEADER | {"typ": "at+JWT"}, claims()),
    "without kid where there is one key": lambda: by_hand({"alg": "Ed25519"}, claims()),
    "same kid of the other issuer": lambda: by_hand(HEADER, claims(iss="theirs"), THEIRS),
    "key address that nobody follows": lambda: by_hand(HEADER | {"jku": "http://127.0.0.1:1/k"}, claims()),
    "one of two audiences": lambda: good(aud=["other", "pin"]),
    "iat long ago": lambda: good(iat=1),
    "fractions of a second": lambda: good(exp=time.time() + 60.5),
    "RS256": lambda: jwt.encode({"alg": "RS256", "kid": "rsa"}, claims(iss="rsa"), RSA, algorithms=["RS256"]),
    "the second of two keys": lambda: jwt.encode(
        {"alg": "ES256", "kid": "ec1"}, claims(iss="mixed"), MIXED[1], algorithms=["ES256"]
    ),
}


@pytest.fixture
def client() -> httpx.AsyncClient:
    app = create_app(
        title="t", version="1", registry=CollectorRegistry(), routers=[router], state={"verifier": VERIFIER}
    )
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://t")


@pytest.mark.parametrize("name", ATTACKS)
async def test_an_attack_is_answered_with_401(client: httpx.AsyncClient, name: str):
    answer = await client.get("/who", headers={"authorization": f"Bearer {ATTACKS[name]()}"})
    assert (answer.status_code, answer.headers.get("www-authenticate")) == (401, "Bearer"), answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["code"] == "unauthenticated"


@pytest.mark.parametrize("name", ACCEPTED)
async def test_an_honest_token_is_accepted(client: httpx.AsyncClient, name: str):
    answer = await client.get("/who", headers={"authorization": f"Bearer {ACCEPTED[name]()}"})
    assert answer.json() == "u", name


@pytest.mark.parametrize("scheme", ["bearer", "BEARER", "Bearer  "])
async def test_the_scheme_is_read_as_http_reads_it(client: httpx.AsyncClient, scheme: str):
    assert (await client.get("/who", headers={"authorization": f"{scheme} {good()}"})).status_code == 200


@pytest.mark.parametrize("value", ["", "Bearer", "Basic dTpw", "Token {}", "{}", "Bearer\0{}", "Bearer:{}"])
async def test_what_is_no_bearer_token_is_401(client: httpx.AsyncClient, value: str):
    answer = await client.get("/who", headers={"authorization": value.format(good())})
    assert (answer.status_code, answer.headers.get("www-authenticate")) == (401, "Bearer"), answer.text
