#!/usr/bin/env bash
# Pin every package with its hashes: lock.sh PIP_COMPILE. Run it after a change of a .in file; then run all tests.
set -euo pipefail
cd "$(dirname "$0")"
compile() {
    "$1" --quiet --generate-hashes --strip-extras --no-annotate --no-header --no-emit-index-url \
        --no-emit-find-links --no-emit-trusted-host --no-emit-options "${@:2}"
}
compile "$1" --allow-unsafe base.in -o base.txt
compile "$1" --allow-unsafe dev.in -o dev.txt
compile "$1" --no-allow-unsafe --unsafe-package torch --unsafe-package triton --unsafe-package torchvision \
    --unsafe-package torchaudio --unsafe-package torchcodec vllm.in -o vllm.txt
"$(dirname "$1")/python" check_cuda.py --update
for each in clients litellm aiperf instructor site audit; do # environments of their own, .cache/clients/NAME and .cache/NAME
    compile "$1" --allow-unsafe "$each.in" -o "$each.txt"
done
