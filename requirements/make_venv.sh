#!/usr/bin/env bash
# make_venv.sh PYTHON VENV: makes a virtual environment of Python 3.11, or says what is missing.
set -euo pipefail
python=$1 venv=$2
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null || {
    echo "setup: pdmesh needs Python 3.11, and \"$python\" is: $("$python" --version 2>&1 | head -1)" \
        "- install it (apt install python3.11 python3.11-venv), or name it: make PYTHON=/path/to/python3.11" >&2
    exit 1
}
echo "setup: making $venv"
"$python" -m venv "$venv" || {
    echo "setup: cannot make $venv; on Debian: apt install python3.11-venv" >&2
    exit 1
}
