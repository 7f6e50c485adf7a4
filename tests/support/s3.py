"""A real S3 front for tests: moto's server in a process of its own, with buckets to fill."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import urllib3

_START_SECONDS = 60.0


class S3Server:
    """An S3 server at `endpoint`; a context manager.

    Args:
        host: the address that it listens at.

    Attributes:
        endpoint: its URL.
        storage_options: what fsspec and streamload need to reach it.
        environ: what the aws command and boto3 need to reach it.
    """

    key = "testing"
    secret = "testing-secret"
    region = "us-east-1"

    def __init__(self, host: str = "127.0.0.1") -> None:
        port = _free_port(host)
        self.endpoint = f"http://{host}:{port}"
        self.storage_options: dict[str, Any] = {
            "endpoint_url": self.endpoint,
            "key": self.key,
            "secret": self.secret,
            "client_kwargs": {"region_name": self.region},
        }
        self.environ = {
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", host, "-p", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **self.environ},
        )
        try:
            self._wait_until_it_answers()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> S3Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the server; idempotent."""
        self._process.kill()
        self._process.wait()

    def create_bucket(self, bucket: str) -> None:
        """Make a bucket."""
        self._put(bucket, b"", {})

    def put(self, bucket: str, key: str, body: bytes, *, public: bool = False) -> str:
        """Store an object, which only a public one gives to anybody; return its s3:// URL."""
        self._put(f"{bucket}/{quote(key)}", body, {"x-amz-acl": "public-read"} if public else {})
        return f"s3://{bucket}/{key}"

    def put_files(self, bucket: str, *files: str | os.PathLike[str], prefix: str = "") -> list[str]:
        """Store files under their names; return their s3:// URLs."""
        return [self.put(bucket, prefix + Path(file).name, Path(file).read_bytes()) for file in files]

    def _put(self, path: str, body: bytes, headers: dict[str, str]) -> None:
        """Send it; moto wants to see a name, but checks no signature unless it is told to."""
        scope = f"{self.key}/20300101/{self.region}/s3/aws4_request"
        signed = f"AWS4-HMAC-SHA256 Credential={scope}, SignedHeaders=host, Signature=0"
        with urllib3.PoolManager() as pools:
            answer = pools.request(
                "PUT", f"{self.endpoint}/{path}", body=body, headers={"Authorization": signed, **headers}
            )
        if answer.status != 200:
            raise RuntimeError(f"moto's server answers {answer.status} to PUT {path}: {answer.data[:500]!r}")

    def _wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        with urllib3.PoolManager() as pools:
            while self._process.poll() is None and time.monotonic() < deadline:
                try:
                    pools.request("GET", self.endpoint + "/moto-api/", retries=False, timeout=1.0)
                except urllib3.exceptions.HTTPError:
                    time.sleep(0.05)
                else:
                    return
        status = self._process.poll()
        raise RuntimeError(f"moto's server did not answer in {_START_SECONDS:g} s (exit status {status})")


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
