"""Check that vllm-cuda.txt is what vllm-cuda.in resolves to, or `--update` it.

uv reads the metadata of each wheel with a range request, so the check takes seconds and downloads
no wheel. pip would download every wheel to learn what it needs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
UV = "uv==0.13.9"
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
# The oldest Python and Linux that the image and Debian 12 have.
OPTIONS = ("--python-version=3.11.2", "--python-platform=x86_64-manylinux_2_28")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--update", action="store_true")
    is_update = parser.parse_args().update
    pinned = HERE / "vllm-cuda.txt"
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.txt"
        if not is_update:
            found.write_text(pinned.read_text())  # uv keeps the pins that are still right
        error = resolve(Path(folder), pinned if is_update else found)
        if error:
            print(f"vllm-cuda.in does not resolve: {error}", file=sys.stderr)
            return 1
        if not is_update and found.read_text() != pinned.read_text():
            print("vllm-cuda.txt is old: run requirements/check_cuda.py --update", file=sys.stderr)
            return 1
    return 0


def resolve(folder: Path, out: Path) -> str:
    """Write what vllm-cuda.in resolves to; returns why it does not, or nothing."""
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    subprocess.run((*pip, "--target", str(folder / "uv"), UV), check=True)
    command = (
        str(folder / "uv/bin/uv"), "pip", "compile", "--quiet", "--generate-hashes",
        "--no-annotate", "--no-header", *OPTIONS, "vllm-cuda.in", "-o", str(out),
    )  # fmt: skip
    environment = dict(os.environ)
    if Path(CERTIFICATES).exists():
        environment.setdefault("SSL_CERT_FILE", CERTIFICATES)
    done = subprocess.run(
        command, cwd=HERE, env=environment, capture_output=True, text=True, check=False
    )
    return done.stderr.strip() if done.returncode else ""


if __name__ == "__main__":
    sys.exit(main())
