"""A real Prometheus that scrapes a service under test."""

import json
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from quire.cli.up import ports
from tests.e2e.child import eventually
from tests.observe.expressions import RULES

PROMETHEUS = shutil.which("prometheus")


class Prometheus:
    """A Prometheus server on the loopback with our rules, as a context manager."""

    def __init__(self, directory: Path, targets: Mapping[str, str]) -> None:
        """`targets` is host:port by process."""
        groups = [
            {"targets": [address], "labels": {"process": name}} for name, address in targets.items()
        ]
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(RULES)],
            "scrape_configs": [{"job_name": "quire", "static_configs": groups}],
        }
        self._directory = directory
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config))

    def __enter__(self) -> Self:
        assert PROMETHEUS is not None
        self._address = f"127.0.0.1:{ports.require_free('127.0.0.1', 0, 'prometheus')}"
        command = [
            *(PROMETHEUS, f"--config.file={self._directory}/prometheus.yml"),
            *(f"--storage.tsdb.path={self._directory}/data", "--log.level=warn"),
            f"--web.listen-address={self._address}",
        ]
        log = (self._directory / "log").open("wb")
        with log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.terminate()
        self._process.wait(20)

    def get(self, path: str, **arguments: str) -> Any:
        """The API's answer; None if the server is not up yet."""
        url = f"http://{self._address}/api/v1/{path}?{urllib.parse.urlencode(arguments)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            if error.code == HTTPStatus.SERVICE_UNAVAILABLE:
                return None
            raise AssertionError(f"{arguments}: {error.read().decode()}") from error
        except urllib.error.URLError:
            assert self._process.poll() is None, (self._directory / "log").read_text()
            return None

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an instant query."""
        data = eventually(lambda: self.get("query", query=expression), "an answer", 30)
        found: list[dict[str, Any]] = data["result"]
        return found

    def wait_for(self, expression: str, within_s: float = 30.0) -> list[dict[str, Any]]:
        """The samples of an instant query, when there are some."""
        return eventually(lambda: self.query(expression) or None, expression, within_s)
