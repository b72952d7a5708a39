"""Tokens: one kind is accepted, and a dozen ways to forge or spoil one are not."""

import base64
import hmac
import time
from collections.abc import Callable
from typing import Any
from uuid import UUID

import orjson
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from joserfc import jwt
from joserfc.jwk import ECKey, OKPKey, RSAKey

from chassis.db import Actor
from chassis.identity import Forbidden, Principal, TokenVerifier, Unauthenticated
from chassis.settings import JwtIssuer

TENANT, PARTNER = UUID(int=1), UUID(int=2)
KEY = OKPKey.generate_key("Ed25519", {"kid": "ours"})
RSA = RSAKey.generate_key(2048, {"kid": "theirs"})
STRANGER = OKPKey.generate_key("Ed25519", {"kid": "ours"})


def issuer(name: str, key: Any, algorithm: str, audience: str = "pin") -> JwtIssuer:
    jwks = {"keys": [key.as_dict(private=False)]}
    return JwtIssuer(issuer=name, audience=audience, algorithms=[algorithm], jwks=jwks)


VERIFIER = TokenVerifier([issuer("ours", KEY, "Ed25519"), issuer("theirs", RSA, "RS256")])


def claims(**changes: object) -> dict[str, object]:
    """Return acceptable claims with some changed (None: left out)."""
    now = int(time.time())
    full = {
        "iss": "ours",
        "aud": "pin",
        "sub": "user-1",
        "iat": now,
        "exp": now + 600,
        "tenant_id": str(TENANT),
        "partner_id": str(PARTNER),
        "roles": ["MANAGER", "ADMIN"],
        "scope": "deals:read deals:write",
    }
    return {name: value for name, value in {**full, **changes}.items() if value is not None}


def signed(body: dict[str, object], key: Any = KEY, algorithm: str = "Ed25519", **header: object) -> str:
    return jwt.encode({"alg": algorithm, "kid": "ours"} | header, body, key, algorithms=[algorithm])


def encoded(part: object) -> str:
    raw = part if isinstance(part, bytes) else orjson.dumps(part)
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def hmac_with_public_key() -> str:
    """Return a token signed by HS256 whose secret is the issuer's public key, as everyone knows it."""
    secret = RSA.public_key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    head = f"{encoded({'alg': 'HS256', 'kid': 'theirs'})}.{encoded(claims(iss='theirs'))}"
    return f"{head}.{encoded(hmac.digest(secret, head.encode(), 'sha256'))}"


def with_unknown_critical_header() -> str:
    head = f"{encoded({'alg': 'Ed25519', 'kid': 'ours', 'crit': ['x-hold'], 'x-hold': 1})}.{encoded(claims())}"
    return f"{head}.{encoded(KEY.private_key.sign(head.encode()))}"


def resigned_with_other_claims() -> str:
    header, _, signature = signed(claims()).split(".")
    return f"{header}.{encoded(claims(tenant_id=str(UUID(int=9))))}.{signature}"


def unsigned(algorithm: str) -> str:
    return f"{encoded({'alg': algorithm})}.{encoded(claims())}."


async def test_a_valid_token_becomes_a_principal():
    principal = await VERIFIER.verify(signed(claims()))
    assert principal == Principal(
        "user-1", TENANT, PARTNER, frozenset({"MANAGER", "ADMIN"}), frozenset({"deals:read", "deals:write"})
    )
    assert principal.actor == Actor(TENANT, PARTNER, "user-1", frozenset({"MANAGER", "ADMIN"}))


async def test_each_issuer_signs_with_its_own_key():
    token = signed(claims(iss="theirs"), RSA, "RS256", kid="theirs")
    assert (await VERIFIER.verify(token)).subject == "user-1"


async def test_what_a_token_may_leave_out():
    principal = await VERIFIER.verify(signed(claims(partner_id=None, roles=None, scope=None, iat=None)))
    assert (principal.partner_id, principal.roles, principal.scopes) == (None, frozenset(), frozenset())
    assert (await VERIFIER.verify(signed(claims(aud=["other", "pin"])))).subject == "user-1"


async def test_clocks_may_differ_by_half_a_minute():
    now = int(time.time())
    assert await VERIFIER.verify(signed(claims(exp=now - 20)))
    assert await VERIFIER.verify(signed(claims(nbf=now + 20)))


@pytest.mark.parametrize(
    "changes",
    [
        {"iss": "stranger"},
        {"iss": "theirs"},
        {"iss": None},
        {"iss": ["ours"]},
        {"aud": "other"},
        {"aud": ["other"]},
        {"aud": None},
        {"exp": int(time.time()) - 60},
        {"exp": None},
        {"exp": "never"},
        {"nbf": int(time.time()) + 600},
        {"sub": None},
        {"sub": ""},
        {"tenant_id": None},
        {"tenant_id": ""},
        {"tenant_id": "everyone"},
        {"tenant_id": 7},
        {"tenant_id": [str(TENANT)]},
        {"partner_id": "someone"},
        {"roles": 7},
    ],
    ids=lambda changes: " ".join(
        f"{name}={'an instant' if isinstance(value, int) and value > 1000 else value}"
        for name, value in changes.items()
    ),
)
async def test_claims_that_are_wrong_or_missing_are_refused(changes: dict[str, object]):
    body = claims(**changes)
    with pytest.raises(Unauthenticated):
        await VERIFIER.verify(signed(body))


@pytest.mark.parametrize(
    "forge",
    [
        lambda: unsigned("none"),
        lambda: unsigned("None"),
        lambda: unsigned("Ed25519"),
        hmac_with_public_key,
        resigned_with_other_claims,
        lambda: signed(claims(), STRANGER),
        lambda: signed(claims(iss="theirs")),
        lambda: signed(claims(), RSA, "RS256", kid="theirs"),
        lambda: signed(claims(iss="theirs"), RSA, "PS256", kid="theirs"),
        lambda: signed(claims(iss="theirs"), RSAKey.generate_key(2048), "RS256", kid="theirs"),
        lambda: signed(claims(), ECKey.generate_key("P-256"), "ES256"),
        lambda: signed(claims(), STRANGER, jwk=STRANGER.as_dict(private=False)),
        lambda: signed(claims(), STRANGER, jku="https://evil.example/keys"),
        with_unknown_critical_header,
        lambda: signed(claims())[:-4],
        lambda: signed(claims()) + "A",
    ],
    ids=[
        "alg none", "alg None", "no signature", "HS256 with the public key", "other claims", "stranger's key",
        "other issuer's name", "other issuer's key", "other algorithm", "other RSA key", "other kind of key",
        "key in the header", "key address in the header", "unknown critical header", "cut signature", "long signature",
    ],
)  # fmt: skip
async def test_forged_tokens_are_refused(forge: Callable[[], str]):
    token = forge()
    with pytest.raises(Unauthenticated):
        await VERIFIER.verify(token)


@pytest.mark.parametrize(
    "token",
    [
        "", ".", "..", "...", "a", "a.b.c", "é.é.é", "\ud800.b.c", "a.b.c.d.e", "null", "{}", " " * 50, "\0.\0.\0",
        f"{encoded([])}.{encoded({})}.", f"{encoded(7)}.{encoded({})}.x", f"{encoded({})}.{encoded({})}.x",
        f"{encoded({'alg': 7})}.{encoded({})}.x", f"{encoded({'alg': ['Ed25519']})}.{encoded({})}.x",
        f"{encoded({'alg': 'Ed25519', 'kid': ['ours']})}.{encoded({})}.x",
        f"{encoded({'alg': 'Ed25519', 'kid': None})}.{encoded({})}.x",
        f"{encoded({'alg': 'Ed25519', 'kid': 'ours'})}.{encoded(b'[' * 100_000)}.x",
        f"{encoded(b'[' * 100_000)}.{encoded({})}.x",
        *(f"{encoded({'alg': 'Ed25519', 'kid': 'ours', 'crit': odd})}.{encoded({})}.AAAA" for odd in (5, {}, "x")),
        "a" * 1_000_000, "." * 100_000,
    ],
    ids=range(27),
)  # fmt: skip
async def test_rubbish_is_refused_and_never_an_error_of_another_kind(token: str):
    with pytest.raises(Unauthenticated):
        await VERIFIER.verify(token)


@pytest.mark.parametrize("payload", [[], [1], "text", 7, None, b"\xff", b"{"], ids=repr)
async def test_a_signed_payload_that_is_no_object_is_refused(payload: object):
    head = encoded({"alg": "Ed25519", "kid": "ours"})
    body = encoded(payload)
    signature = KEY.private_key.sign(f"{head}.{body}".encode())
    with pytest.raises(Unauthenticated):
        await VERIFIER.verify(f"{head}.{body}.{encoded(signature)}")


async def test_without_issuers_no_token_is_accepted():
    with pytest.raises(Unauthenticated):
        await TokenVerifier([]).verify(signed(claims()))


async def test_a_refusal_does_not_repeat_the_token():
    token = signed(claims(aud="other", tenant_id="secret-tenant"))
    with pytest.raises(Unauthenticated) as caught:
        await VERIFIER.verify(token)
    assert token not in str(caught.value)
    assert "secret-tenant" not in str(caught.value)


async def test_a_scope_is_required_whole():
    principal = await VERIFIER.verify(signed(claims(scope="deals:read")))
    principal.require("deals:read")
    for scope in ("deals:write", "deals", "deals:rea", "deals:read deals:read", ""):
        with pytest.raises(Forbidden):
            principal.require(scope)


async def test_a_signed_payload_that_is_nested_too_deep_is_refused():
    head = f"{encoded({'alg': 'Ed25519', 'kid': 'ours'})}.{encoded(b'[' * 5000)}"
    with pytest.raises(Unauthenticated):
        await VERIFIER.verify(f"{head}.{encoded(KEY.private_key.sign(head.encode()))}")
