#!/usr/bin/env bash
# Build the docs' site: site.sh PYTHON FOLDER. FOLDER/html is the site. Its packages stay apart, in FOLDER/venv.
# Material for MkDocs gets fixes until May 2027. Zensical succeeds it; on 2026-11-27 one of its packages could not be had.
set -euo pipefail
python=$1 folder=$2
here=$(cd "$(dirname "$0")" && pwd)
[ -x "$folder/venv/bin/mkdocs" ] || "$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes -r "$here/site.txt"
cd "$here/.."
NO_MKDOCS_2_WARNING=1 "$folder/venv/bin/mkdocs" build --quiet --strict --site-dir "$folder/html"
echo "site: $folder/html/index.html"
