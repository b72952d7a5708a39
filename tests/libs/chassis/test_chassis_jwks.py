"""Keys fetched from an issuer: asked rarely whatever strangers send, and good for a while when it is away."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import httpx
import pytest
import respx
from joserfc import jwt
from joserfc.jwk import OctKey, OKPKey, RSAKey

from chassis import jwks
from chassis.identity import IssuerUnavailable, TokenVerifier, Unauthenticated
from chassis.settings import JwtIssuer

ADDRESS = "https://issuer.example/keys"
OLD, NEW = (OKPKey.generate_key("Ed25519", {"kid": kid}) for kid in ("old", "new"))


class Ages:
    """A clock of ages that moves when told to."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def document(*keys: Any) -> dict[str, Any]:
    return {"keys": [key.as_dict(private=False) for key in keys]}


def token(key: OKPKey = OLD, kid: str | None = None) -> str:
    claims = {"iss": "far", "aud": "pin", "sub": "u", "exp": int(time.time()) + 60, "tenant_id": str(UUID(int=1))}
    return jwt.encode({"alg": "Ed25519", "kid": kid or key.kid}, claims, key, algorithms=["Ed25519"])


@pytest.fixture
def ages() -> Ages:
    return Ages()


@pytest.fixture
def verifier(ages: Ages) -> TokenVerifier:
    issuer = JwtIssuer(issuer="far", audience="pin", algorithms=["Ed25519"], jwks_url=ADDRESS)
    return TokenVerifier([issuer], monotonic=ages)


@pytest.fixture
def issuer() -> Iterator[respx.Route]:
    with respx.mock(assert_all_called=False) as router:
        yield router.get(ADDRESS).respond(json=document(OLD))


async def test_keys_are_fetched_when_the_first_token_comes_and_kept(verifier: TokenVerifier, issuer: respx.Route):
    assert issuer.call_count == 0, "the start of a service doesn't need the issuer"
    for _ in range(3):
        assert (await verifier.verify(token())).subject == "u"
    assert issuer.call_count == 1


async def test_a_hundred_first_requests_at_once_ask_the_issuer_once(verifier: TokenVerifier, issuer: respx.Route):
    callers = await asyncio.gather(*(verifier.verify(token()) for _ in range(100)))
    assert (len(callers), issuer.call_count) == (100, 1)


async def test_a_new_key_is_found_within_a_minute(verifier: TokenVerifier, issuer: respx.Route, ages: Ages):
    await verifier.verify(token())
    issuer.respond(json=document(OLD, NEW))
    with pytest.raises(Unauthenticated):
        await verifier.verify(token(NEW))
    ages.seconds += jwks.UNKNOWN_KEY_SECONDS
    assert (await verifier.verify(token(NEW))).subject == "u"
    assert issuer.call_count == 2


async def test_unknown_key_ids_cost_the_issuer_one_question_a_minute(
    verifier: TokenVerifier, issuer: respx.Route, ages: Ages
):
    await verifier.verify(token())
    for minute in range(1, 4):
        ages.seconds += jwks.UNKNOWN_KEY_SECONDS
        outcomes = await asyncio.gather(
            *(verifier.verify(token(kid=f"guess {n}")) for n in range(200)), return_exceptions=True
        )
        assert {type(outcome) for outcome in outcomes} == {Unauthenticated}
        assert issuer.call_count == 1 + minute


async def test_a_key_that_the_issuer_withdrew_is_refused_after_the_next_fetch(
    verifier: TokenVerifier, issuer: respx.Route, ages: Ages
):
    await verifier.verify(token())
    issuer.respond(json=document(NEW))
    ages.seconds += jwks.FRESH_SECONDS + 1
    with pytest.raises(Unauthenticated):
        await verifier.verify(token())


@pytest.mark.parametrize(
    "answer",
    [
        httpx.ConnectError("no route"),
        httpx.ReadTimeout("slow"),
        httpx.Response(500),
        httpx.Response(302, headers={"location": "https://elsewhere.example/keys"}),
        httpx.Response(200, content=b"<html>"),
        httpx.Response(200, content=b"[" * 100_000),
        httpx.Response(200, json=[]),
        httpx.Response(200, json={"keys": "none"}),
        httpx.Response(200, json={"keys": []}),
        httpx.Response(200, json={"keys": [{"kty": "oct", "k": "AAAA", "kid": "old"}]}),
        httpx.Response(200, json={"keys": [OLD.as_dict(private=True)]}),
        httpx.Response(200, json={"keys": [document(OLD)["keys"][0]] * 101}),
        httpx.Response(200, json=document(OLD) | {"more": "x" * jwks.MOST_BYTES}),
    ],
    ids=[
        "away", "slow", "500", "redirect", "no JSON", "bomb", "a list", "keys a text", "no keys", "a shared secret",
        "a private key", "too many keys", "too large",
    ],
)  # fmt: skip
async def test_an_answer_that_holds_no_keys_changes_nothing(
    verifier: TokenVerifier, issuer: respx.Route, ages: Ages, answer: Any
):
    issuer.side_effect = [answer, httpx.Response(200, json=document(OLD)), answer, answer]
    with pytest.raises(IssuerUnavailable):
        await verifier.verify(token())
    with pytest.raises(IssuerUnavailable):
        await verifier.verify(token())
    assert issuer.call_count == 1, "not asked again at once"
    ages.seconds += jwks.FIRST_FETCH_SECONDS
    await verifier.verify(token())
    ages.seconds += jwks.FRESH_SECONDS + 1
    assert (await verifier.verify(token())).subject == "u", "old keys are used while the issuer is away"
    assert issuer.call_count == 3
    ages.seconds += jwks.STALE_SECONDS
    with pytest.raises(IssuerUnavailable):
        await verifier.verify(token())


async def test_a_redirect_is_not_followed(verifier: TokenVerifier, issuer: respx.Route):
    issuer.respond(302, headers={"location": "https://elsewhere.example/keys"})
    elsewhere = respx.get("https://elsewhere.example/keys").respond(json=document(OLD))
    with pytest.raises(IssuerUnavailable):
        await verifier.verify(token())
    assert elsewhere.call_count == 0


async def test_keys_of_other_kinds_are_passed_over(verifier: TokenVerifier, issuer: respx.Route):
    encryption = RSAKey.generate_key(2048, {"kid": "enc", "use": "enc"}).as_dict(private=False)
    strange = [{}, 7, {"kty": "future"}, encryption, OctKey.generate_key(256).as_dict()]
    issuer.respond(json={"keys": [*strange, *document(OLD)["keys"]]})
    assert (await verifier.verify(token())).subject == "u"


async def test_others_use_the_kept_keys_while_one_request_fetches(
    verifier: TokenVerifier, issuer: respx.Route, ages: Ages
):
    await verifier.verify(token())
    ages.seconds += jwks.FRESH_SECONDS + 1
    asked, answer = asyncio.Event(), asyncio.Event()

    async def slow(_: httpx.Request) -> httpx.Response:
        asked.set()
        await answer.wait()
        return httpx.Response(200, json=document(OLD))

    issuer.side_effect = slow
    first = asyncio.create_task(verifier.verify(token()))
    await asked.wait()
    assert (await verifier.verify(token())).subject == "u"
    answer.set()
    assert (await first).subject == "u"


async def test_a_request_that_is_cancelled_while_it_fetches_leaves_the_next_one_free_to_fetch(
    verifier: TokenVerifier, issuer: respx.Route
):
    asked = asyncio.Event()

    async def never(_: httpx.Request) -> httpx.Response:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    issuer.side_effect = never
    first = asyncio.create_task(verifier.verify(token()))
    await asked.wait()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    issuer.side_effect = None
    issuer.respond(json=document(OLD))
    assert (await verifier.verify(token())).subject == "u"


async def test_an_issuer_that_never_ends_its_answer_is_given_up(
    verifier: TokenVerifier, issuer: respx.Route, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(jwks, "FETCH_SECONDS", 0.05)

    async def never(_: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    issuer.side_effect = never
    with pytest.raises(IssuerUnavailable):
        await verifier.verify(token())
