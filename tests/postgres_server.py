"""A PostgreSQL server of the tests, where Debian's postgresql is installed."""

import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

_USER = "quire"
_ACCOUNT = "nobody"
_UNPACKED = Path(__file__).parents[1] / "build/debian"


class PostgresServer:
    """A server on a Unix socket of its own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._names = itertools.count()

    def url(self, database: str = "postgres") -> str:
        return f"postgresql:///{database}?host={self._directory}&user={_USER}"

    def new_database(self) -> str:
        """Makes an empty database; returns its URL."""
        name = f"t{next(self._names)}"
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return self.url(name)


@contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """Starts a server; skips the test by name without PostgreSQL."""
    programs = [
        each
        for root in (Path("/"), _UNPACKED)
        for each in sorted(root.glob("usr/lib/postgresql/*/bin"), reverse=True)
    ]
    path = ":".join([*map(str, programs), os.environ["PATH"]])
    initdb, postgres = shutil.which("initdb", path=path), shutil.which("postgres", path=path)
    if initdb is None or postgres is None:
        pytest.skip("PostgreSQL is not installed; `make postgres` unpacks it")
    env = os.environ.copy()
    if Path(postgres).is_relative_to(_UNPACKED):
        libraries = [*map(str, _UNPACKED.glob("usr/lib/*-linux-gnu"))]
        env["LD_LIBRARY_PATH"] = ":".join(libraries)
    as_user: list[str] = []
    if os.getuid() == 0:  # PostgreSQL does not run as root
        # `Popen(user=…)` would fork, and a fork segfaults while gRPC's threads run; without it,
        # Popen uses vfork.
        as_user = ["setpriv", f"--reuid={_ACCOUNT}", "--regid=nogroup", "--clear-groups"]
    trial = subprocess.run([*as_user, initdb, "--version"], env=env, check=False)
    if trial.returncode:  # an account without rights to the folder, or a library that is missing
        pytest.skip(f"{initdb} cannot be run")
    directory = Path(tempfile.mkdtemp(prefix="quire-pg-"))
    data = directory / "data"
    try:
        if as_user:
            shutil.chown(directory, _ACCOUNT)
        command = [initdb, "-D", str(data), "-U", _USER, "-A", "trust", "-N", "-E", "UTF8"]
        subprocess.run(
            [*as_user, *command], check=True, stdout=subprocess.DEVNULL, cwd=directory, env=env
        )
        options = ("fsync=off", "listen_addresses=", f"unix_socket_directories={directory}")
        server = subprocess.Popen(
            [*as_user, postgres, "-D", str(data)]
            + [part for each in options for part in ("-c", each)],
            cwd=directory,
            env=env,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert server.stderr is not None
            told = []
            for line in server.stderr:
                told.append(line)
                if "ready to accept connections" in line:
                    break
            else:
                pytest.fail("PostgreSQL did not start: " + "".join(told))
            yield PostgresServer(directory)
        finally:
            server.terminate()
            server.communicate()
    finally:
        shutil.rmtree(directory)
