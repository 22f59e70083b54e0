#!/usr/bin/env bash
# One Python environment for every script of the checkout: .venv, made once and kept.
# Source it and call `prepare_environment [test]`; the commands of .venv are then first in PATH.
# Run it (`bash examples/environment.sh [test]`) to do nothing but make the environment.
# AMOS_ENVIRONMENT=active: make nothing, use the environment that is active and holds the package already.

CHECKOUT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
ENVIRONMENT="$CHECKOUT/.venv"
ENVIRONMENT_STAMP="$ENVIRONMENT/amos_fairseq.stamp"
INSTALL_LOG="$ENVIRONMENT/install.log"
# The versions that were run; setup.py says the same to pip.
PYTHON_VERSION="3.11"
TORCH_REQUIREMENT="torch>=2.6,<2.14"

fail() {
    echo "amos_fairseq: error: $*" >&2
    exit 1
}

# Prints "major.minor" of a Python, or nothing where it does not run (a shim of an absent version exists but fails).
python_version_of() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true
}

find_python() {
    local candidate version seen=""
    for candidate in "${PYTHON:-}" "python$PYTHON_VERSION" python3 python; do
        [ -n "$candidate" ] || continue
        version="$(python_version_of "$candidate")"
        if [ "$version" = "$PYTHON_VERSION" ]; then
            echo "$candidate"
            return
        fi
        [ -z "$version" ] || seen="$seen $candidate is $version;"
    done
    fail "needs Python $PYTHON_VERSION, found${seen:- none;} install python$PYTHON_VERSION or name it with PYTHON=/path/to/python$PYTHON_VERSION"
}

# fairseq is built from source: a C++ compiler and Python's headers must be there before anything is downloaded.
check_build_tools() {
    local python="$1" compiler header
    for compiler in "${CXX:-}" c++ g++ clang++; do
        [ -z "$compiler" ] || ! command -v "${compiler%% *}" >/dev/null || break
        compiler=""
    done
    [ -n "$compiler" ] || fail "no C++ compiler found (c++, g++, clang++ or \$CXX): install one, for example the package g++ or build-essential"
    header="$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"] + "/Python.h")')"
    [ -f "$header" ] || fail "Python's headers are missing ($header): install the package python$PYTHON_VERSION-dev"
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "this Python makes no environments (no venv or ensurepip): install the package python$PYTHON_VERSION-venv"
}

# What an up-to-date environment was made from: setup.py's hash, and the checkout, because an environment cannot be moved.
current_stamp() {
    "$ENVIRONMENT/bin/python" - "$CHECKOUT" <<'PYTHON' 2>/dev/null || true
import hashlib, pathlib, sys
checkout = pathlib.Path(sys.argv[1])
print("setup.py", hashlib.sha256((checkout / "setup.py").read_bytes()).hexdigest(), "checkout", checkout)
PYTHON
}

# The stamp is written last, so an interrupted installation has none and is finished by the next run.
environment_is_ready() {
    local extra="$1" stamp
    [ -x "$ENVIRONMENT/bin/python" ] && [ -f "$ENVIRONMENT_STAMP" ] || return 1
    stamp="$(current_stamp)"
    [ -n "$stamp" ] && [ "$(head -n 1 "$ENVIRONMENT_STAMP")" = "$stamp" ] || return 1
    [ -z "$extra" ] || grep -qx "extra $extra" "$ENVIRONMENT_STAMP"
}

# A torch that the machine's Python already has (a vendor's container, for one) is seen by the environment and kept.
sees_usable_torch() {
    "$1" - <<'PYTHON' 2>/dev/null
import importlib.metadata, sys
version = tuple(int(part) for part in importlib.metadata.version("torch").split(".")[:2])
sys.exit(not (sys.prefix == sys.base_prefix and (2, 6) <= version < (2, 14)))
PYTHON
}

make_environment() {
    local python="$1" version options=()
    if [ -e "$ENVIRONMENT" ]; then
        version="$(python_version_of "$ENVIRONMENT/bin/python")"
        [ -z "$version" ] || [ "$version" = "$PYTHON_VERSION" ] ||
            fail "$ENVIRONMENT holds Python $version, needed is $PYTHON_VERSION: remove that folder and start again"
        if [ -f "$ENVIRONMENT_STAMP" ] && [ "$(sed -n '1s/.* checkout //p' "$ENVIRONMENT_STAMP")" != "$CHECKOUT" ]; then
            echo "  the checkout was moved: making .venv anew"
            options+=(--clear)
        elif "$ENVIRONMENT/bin/python" -m pip --version >/dev/null 2>&1; then
            return
        fi
    fi
    ! sees_usable_torch "$python" || options+=(--system-site-packages)
    echo "  making .venv with $("$python" --version)"
    "$python" -m venv ${options[@]+"${options[@]}"} "$ENVIRONMENT" || fail "python -m venv failed in $ENVIRONMENT (see above)"
}

# pip's whole output goes to the log; the terminal shows the lines that tell how far it is.
install() {
    local status=0
    (cd "$CHECKOUT" && "$ENVIRONMENT/bin/python" -m pip install --disable-pip-version-check --progress-bar off "$@" 2>&1) |
        tee -a "$INSTALL_LOG" |
        awk '/^ *(Collecting|Downloading|Building wheel|Installing) / { print "    " substr($0, 1, 100); fflush() }' || status=1
    [ "$status" -eq 0 ] || fail "the installation failed: $(grep -i '^error' "$INSTALL_LOG" | tail -n 1 | cut -c 1-200) (whole log: $INSTALL_LOG)"
}

install_everything() {
    local extra="$1" target="."
    # A second run with the other extra must not take the first one's out of the stamp.
    if [ -z "$extra" ] && [ -f "$ENVIRONMENT_STAMP" ]; then
        extra="$(sed -n 's/^extra //p' "$ENVIRONMENT_STAMP" | head -n 1)"
    fi
    [ -z "$extra" ] || target=".[$extra]"
    rm -f "$ENVIRONMENT_STAMP"
    : >"$INSTALL_LOG"
    echo "  1/3 build tools and PyTorch (the largest download)"
    install --upgrade pip "setuptools>=77" wheel cython
    install numpy "$TORCH_REQUIREMENT"
    echo "  2/3 fairseq and the rest (fairseq is compiled: one or two minutes)"
    install --no-build-isolation --editable "$target"
    echo "  3/3 trying the imports"
    "$ENVIRONMENT/bin/python" -c 'import fairseq, matplotlib, sentencepiece, tensorboard, tokenizers, torch' >>"$INSTALL_LOG" 2>&1 ||
        fail "what was installed does not import: $(tail -n 1 "$INSTALL_LOG") (whole log: $INSTALL_LOG); remove $ENVIRONMENT and start again"
    { current_stamp; [ -z "$extra" ] || echo "extra $extra"; } >"$ENVIRONMENT_STAMP.part"
    mv "$ENVIRONMENT_STAMP.part" "$ENVIRONMENT_STAMP"
}

# prepare_environment [test]: makes or finishes .venv if it is not up to date; needs bash's `set -euo pipefail`.
prepare_environment() {
    local extra="${1:-}" python started=$SECONDS
    case "${AMOS_ENVIRONMENT:-}" in
        "") ;;
        active) return ;;
        *) fail "AMOS_ENVIRONMENT=$AMOS_ENVIRONMENT: it can be 'active' or absent" ;;
    esac
    if ! environment_is_ready "$extra"; then
        python="$(find_python)"
        check_build_tools "$python"
        echo "environment: $ENVIRONMENT (once; about four minutes and the downloads)"
        make_environment "$python"
        install_everything "$extra"
        echo "environment: ready after $((SECONDS - started)) s"
    fi
    export PATH="$ENVIRONMENT/bin:$PATH"
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    set -euo pipefail
    prepare_environment "${1:-}"
fi
