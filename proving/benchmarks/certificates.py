"""Throw-away certificates for a benchmark with TLS, made by the openssl command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from proving.benchmarks.environments import Missing

DAYS = "2"


def make(place: Path) -> Path:
    """An authority, and one certificate that all sides show; `Missing` without openssl."""
    if shutil.which("openssl") is None:
        raise Missing("certificates are made by openssl, which is not installed")
    place.mkdir()
    (place / "extensions").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n", "ascii")
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    for command in (
        ["req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-days", DAYS,
         "-subj", "/CN=bench authority"],
        ["req", *key, "-keyout", "node.key", "-out", "node.csr", "-subj", "/CN=bench node"],
        ["x509", "-req", "-in", "node.csr", "-CA", "ca.pem", "-CAkey", "ca.key",
         "-CAcreateserial", "-out", "node.pem", "-days", DAYS, "-extfile", "extensions"],
    ):  # fmt: skip
        ran = subprocess.run(
            ["openssl", *command], cwd=place, capture_output=True, text=True, check=False
        )
        if ran.returncode:
            raise Missing(f"openssl made no certificate: {ran.stderr.strip().splitlines()[-1]}")
    return place
