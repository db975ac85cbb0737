#!/usr/bin/env bash
# Audit our dependencies and code: audit.sh VENV FOLDER. FOLDER gets the bills of materials. The tools stay apart, in FOLDER/venv.
set -euo pipefail
venv=$1 folder=$2
here=$(cd "$(dirname "$0")" && pwd)
[ -x "$folder/venv/bin/pip-audit" ] || "$venv/bin/python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes -r "$here/audit.txt"
cd "$here/.."
"$folder/venv/bin/python" -m tools.audit "$folder" "$venv/bin/ruff" "$venv" "$folder/venv"
