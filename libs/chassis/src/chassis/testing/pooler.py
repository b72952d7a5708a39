"""pgbouncer in transaction mode in front of a Postgres of ours: what sessions must not count on shows behind it."""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

from chassis.testing.processes import HOST, CannotStart, accepts_connections, free_ports, popen_tied, stop, wait_until
from chassis.testing.servers import EmbeddedPostgres

CHOICE: Final = "PIN_POOLER"
"""Set to `pgbouncer`, the services' roles in tests connect through it."""

_CONFIG: Final = """
[databases]
* = host={host} port={postgres}
[pgbouncer]
listen_addr = {host}
listen_port = {port}
unix_socket_dir =
pool_mode = transaction
auth_type = trust
auth_file = {users}
max_client_conn = 500
default_pool_size = 20
server_reset_query =
ignore_startup_parameters = extra_float_digits
log_connections = 0
log_disconnections = 0
"""


class PgBouncer:
    """A running pgbouncer (Debian package pgbouncer)."""

    def __init__(self, port: int, home: Path, process: subprocess.Popen[bytes]) -> None:
        self.port = port
        self._home = home
        self._process = process

    @classmethod
    def start(cls, postgres: EmbeddedPostgres, roles: Sequence[str]) -> Self:
        """Start one in front of a server.

        Args:
            postgres: the server; its home's parent holds the pooler's files.
            roles: who may connect.

        Raises:
            CannotStart: it is not installed, or didn't come up.
        """
        binary = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
        if binary is None:
            raise CannotStart("pgbouncer is not installed (Debian package pgbouncer)")
        user = pwd.getpwnam("nobody") if os.geteuid() == 0 else None
        home = Path(tempfile.mkdtemp(prefix="pin-pooler-"))
        home.chmod(0o755)
        (port,) = free_ports(1)
        config = home / "pgbouncer.ini"
        users = home / "users.txt"
        users.write_text("".join(f'"{role}" ""\n' for role in roles))
        config.write_text(_CONFIG.format(host=HOST, postgres=postgres.port, port=port, users=users))
        if user is not None:
            os.chown(home, user.pw_uid, user.pw_gid)
        with (home / "pgbouncer.log").open("ab") as output:
            process = popen_tied(
                [binary, str(config)], cwd=home, output=output, uid=None if user is None else user.pw_uid
            )
        if not wait_until(lambda: accepts_connections(port), 10, process):
            stop(process)
            lines = (home / "pgbouncer.log").read_text(errors="replace").splitlines()
            raise CannotStart(f"pgbouncer did not start: {lines[-1] if lines else 'it said nothing'}")
        return cls(port, home, process)

    def stop(self) -> None:
        """Stop it and remove its files."""
        stop(self._process)
        shutil.rmtree(self._home, ignore_errors=True)
