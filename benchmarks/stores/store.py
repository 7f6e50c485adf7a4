"""A store in a process of its own, on loopback, with buckets to fill."""

from __future__ import annotations

import ctypes
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import botocore.config
import botocore.session
import urllib3
from botocore.exceptions import ClientError

ENVIRONMENT = Path(__file__).resolve().parents[2] / ".venv-stores"
_HERE = Path(__file__).parent
_START_SECONDS = 60.0
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


@dataclass(frozen=True)
class Kind:
    """A store that can be started.

    Attributes:
        program: without this file it isn't installed.
        key, secret: who may use it.
        command: starts it, given a directory and a port.
    """

    name: str
    program: Path
    key: str
    secret: str
    command: Callable[[Kind, Path, int], list[str]]

    def why_not(self) -> str:
        """Why it can't be started here; empty if it can."""
        if not self.program.exists():
            return f"{self.name} is not installed; make faults does that (s3rver where there is npm)"
        return ""


def _swift(kind: Kind, directory: Path, port: int) -> list[str]:
    python = str(ENVIRONMENT / "bin/python")
    return [python, str(_HERE / "swift_server.py"), str(directory), str(port), kind.key, kind.secret]


def _rclone(kind: Kind, directory: Path, port: int) -> list[str]:
    command = [str(kind.program), "serve", "s3", "--config", "", "--addr", f"127.0.0.1:{port}"]
    return [*command, "--auth-key", f"{kind.key},{kind.secret}", str(directory)]


def _s3rver(kind: Kind, directory: Path, port: int) -> list[str]:
    return ["node", str(kind.program), "-d", str(directory), "-a", "127.0.0.1", "-p", str(port)]


KINDS = {
    kind.name: kind
    for kind in (
        Kind("swift", ENVIRONMENT / "bin/swift-proxy-server", "test:tester", "testing", _swift),
        Kind("rclone", ENVIRONMENT / "bin/rclone", "testing", "testing-secret", _rclone),
        Kind("s3rver", ENVIRONMENT / "node_modules/.bin/s3rver", "S3RVER", "S3RVER", _s3rver),
    )
}


class Store:
    """A running store; a context manager.

    Attributes:
        port: where it listens, on loopback.
        endpoint: its URL.
    """

    bucket = "shards"

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.port = _free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._directory = Path(tempfile.mkdtemp(prefix="streamload-store-"))
        self._log = (self._directory / "log").open("w+")
        data = self._directory / "data"
        data.mkdir()
        self._process = subprocess.Popen(
            kind.command(kind, data, self.port),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            cwd=data,
            preexec_fn=_end_with_parent,
        )
        try:
            self._wait_until_it_answers()
            self.client = self._connect()
            self.client.create_bucket(Bucket=self.bucket)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def storage_options(self, endpoint: str) -> dict[str, Any]:
        """What a user gives for shards in it, through an endpoint."""
        return {
            "endpoint_url": endpoint,
            "key": self.kind.key,
            "secret": self.kind.secret,
            "client_kwargs": {"region_name": "us-east-1"},
        }

    def put(self, key: str, path: Path) -> str:
        """Store a file, whatever was there; its URL."""
        self.client.put_object(Bucket=self.bucket, Key=key, Body=path.read_bytes())
        return f"s3://{self.bucket}/{key}"

    def status_of(self, key: str, **how: str) -> int:
        """The status of an answer to a GET."""
        try:
            answer = self.client.get_object(Bucket=self.bucket, Key=key, **how)
            answer["Body"].read()
        except ClientError as exc:
            answer = exc.response
        status: int = answer["ResponseMetadata"]["HTTPStatusCode"]
        return status

    def close(self) -> None:
        """End it and remove all that it holds; idempotent."""
        self._process.kill()
        self._process.wait()
        self._log.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _connect(self) -> Any:
        config = botocore.config.Config(
            retries={"total_max_attempts": 3},
            read_timeout=_START_SECONDS / 2,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"addressing_style": "path"},
        )
        return botocore.session.Session().create_client(
            "s3",
            region_name="us-east-1",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.kind.key,
            aws_secret_access_key=self.kind.secret,
            config=config,
        )

    def _wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        with urllib3.PoolManager() as pools:
            while self._process.poll() is None and time.monotonic() < deadline:
                try:
                    pools.request("GET", self.endpoint, retries=False, timeout=5.0)
                except urllib3.exceptions.HTTPError:
                    time.sleep(0.05)
                else:
                    return
        self._log.flush()
        said = (self._directory / "log").read_text()[-2000:]
        raise RuntimeError(f"{self.kind.name} did not answer in {_START_SECONDS:g} s: {said}")


def _end_with_parent() -> None:
    """The kernel kills this process when the one that started it ends, however that happens."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
