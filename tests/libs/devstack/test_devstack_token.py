"""`make token` prints tokens that this checkout's services accept, with the roles and scopes that were asked for."""

import io
from contextlib import redirect_stdout
from pathlib import Path
from uuid import UUID

import pytest

from chassis.identity import Principal, TokenVerifier
from chassis.settings import JwtIssuer
from devstack import __main__ as devstack
from devstack.identity import EVERYTHING, DevelopmentIssuer

TENANT = "0b7d4d3e-3c8f-4f0f-8a55-7b9d6f2e1a01"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout without a key yet, and a shell without wishes."""
    monkeypatch.setattr(devstack, "HOME", tmp_path)
    monkeypatch.setattr("sys.argv", ["devstack", "token"])
    for name in ("TENANT", "SUB", "ROLES", "SCOPE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


async def caller(home: Path) -> Principal:
    """Return who the printed token says that its bearer is."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        assert devstack.main() == 0
    trusted = JwtIssuer.model_validate(DevelopmentIssuer.load(home).trusted())
    return await TokenVerifier([trusted]).verify(printed.getvalue().strip())


async def test_a_token_without_wishes_opens_everything_of_one_tenant(home: Path):
    found = await caller(home)
    assert (found.subject, found.roles, found.scopes) == ("developer", {"MANAGER"}, set(EVERYTHING.split()))


async def test_a_token_has_the_tenant_the_subject_the_roles_and_the_scope_that_were_asked_for(
    home: Path, monkeypatch: pytest.MonkeyPatch
):
    wishes = {"TENANT": TENANT, "SUB": "on-call", "ROLES": "platform-admin, ADMIN", "SCOPE": "crm:admin crm:deals:read"}
    for name, value in wishes.items():
        monkeypatch.setenv(name, value)
    found = await caller(home)
    assert (found.tenant_id, found.subject) == (UUID(TENANT), "on-call")
    assert found.roles == {"platform-admin", "ADMIN"}
    assert found.scopes == {"crm:admin", "crm:deals:read"}


def test_a_tenant_that_is_no_id_is_refused_in_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("TENANT", "mine")
    assert devstack.main() != 0
    assert "TENANT must be a UUID" in capsys.readouterr().err
