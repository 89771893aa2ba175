"""Builds, starts and removes the deployment of compose.yaml, as a separate project."""

import json
import os
from pathlib import Path

from tests.compose.engine import docker
from tests.e2e.child import eventually

ROOT = Path(__file__).parents[2]
SERVICES = ("router", "scheduler", "worker")

_BUILD_S = 3600
_HEALTHY_S = 300
_ENGINE_S = 120
_KILL = "import os, sys; os.kill(int(sys.argv[1]), 9)"


class Deployment:
    """One compose project with its own names, tags and ports.

    BASE_IMAGE, PIP_CONFIG_FILE, TORCH and the other variables of compose.yaml come from the caller.
    """

    def __init__(self) -> None:
        self._project = f"quire-test-{os.getpid()}"
        # The engine chooses the ports.
        self._env = {"QUIRE_TAG": self._project, "HTTP_PORT": "0", "GRPC_PORT": "0"}

    def build(self) -> None:
        self._compose("build", within_s=_BUILD_S)

    def up(self) -> None:
        """Starts all containers, and returns when they are healthy."""
        self._compose("up", "--detach", "--no-build", "--wait", within_s=_HEALTHY_S)

    def down(self) -> None:
        """Removes containers, network, volumes and images; the builder's cache stays."""
        self._compose("down", "--volumes", "--rmi", "all", "--timeout", "5")

    @property
    def http(self) -> str:
        """The router's HTTP address, "host:port"; it changes with each start."""
        return self._compose("port", "router", "8000").strip()

    @property
    def grpc(self) -> str:
        return self._compose("port", "router", "50051").strip()

    def image(self, service: str) -> str:
        return f"quire-{service}:{self._project}"

    def python(self, service: str, program: str) -> str:
        """The output of `program` in a running container."""
        return self._compose("exec", "-T", service, "python", "-c", program).strip()

    def logs(self, service: str) -> str:
        return self._compose("logs", "--no-color", service)

    def num_restarts(self, service: str) -> int:
        count: int = self._inspect(service)["RestartCount"]
        return count

    def exit_code(self, service: str) -> int:
        code: int = self._inspect(service)["State"]["ExitCode"]
        return code

    def kill(self, service: str) -> None:
        """Kills the process without the engine's `kill`, after which the engine would not restart
        it.

        Returns when the engine has noticed. The signal comes from a container in the host's process
        namespace, because a container's first process ignores signals from inside.
        """
        before = self.num_restarts(service)
        pid = str(self._inspect(service)["State"]["Pid"])
        as_root = ("--pid", "host", "--user", "0", "--entrypoint", "python")
        docker("run", "--rm", *as_root, self.image(service), "-c", _KILL, pid, within_s=_ENGINE_S)
        eventually(
            lambda: self.num_restarts(service) > before or None,
            f"the engine restarts the {service}",
            _ENGINE_S,
        )

    def stop(self, service: str) -> None:
        """Sends SIGTERM, and returns when the process or its grace period has ended."""
        self._compose("stop", service)

    def _inspect(self, service: str) -> dict:
        container = self._compose("ps", "--all", "--quiet", service).strip()
        return json.loads(docker("inspect", container, within_s=_ENGINE_S))[0]

    def _compose(self, *arguments: str, within_s: float = _ENGINE_S) -> str:
        files = ("--project-directory", str(ROOT), "--file", str(ROOT / "compose.yaml"))
        return docker(
            "compose", "--project-name", self._project, *files, *arguments,
            env=self._env, within_s=within_s,
        )  # fmt: skip
