"""A certificate for servers on loopback (needs the `openssl` command)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def write_certificate(directory: str | os.PathLike[str]) -> tuple[str, str]:
    """Write a certificate for 127.0.0.1, good for two days, and its key; their files.

    Nobody trusts it until told to, as by the environment's `SSL_CERT_FILE`.
    """
    files = str(Path(directory) / "cert.pem"), str(Path(directory) / "key.pem")
    make = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost"
    more = ["-addext", "subjectAltName=IP:127.0.0.1", "-out", files[0], "-keyout", files[1]]
    subprocess.run([*make.split(), *more], check=True, capture_output=True)
    return files
