"""The embedded Postgres where its user can't read the checkout: run as root from a folder that is root's alone."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from chassis.testing import servers


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has to run Postgres as somebody else")
def test_postgres_runs_from_a_copy_where_its_user_cannot_read_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(servers, "_reachable", lambda folder: False)
    server = servers.EmbeddedPostgres.start(tmp_path / "postgres", settings=servers.FAST_AND_UNSAFE)
    try:
        assert not server.home.is_relative_to(tmp_path)
        command = [str(server._binaries / "psql"), server.url(), "-Atc", "select 6 * 7"]
        asked = subprocess.run(command, capture_output=True, text=True, check=False)
        assert asked.stdout.strip() == "42", asked.stderr
    finally:
        server.stop()
        shutil.rmtree(server.home)
