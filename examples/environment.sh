#!/usr/bin/env bash
# Create the Python environment of all scripts of the checkout: .venv, created once and reused.
# Source this file and call `prepare_environment [test]`; the commands of .venv are then first in PATH.
# Run it (`bash examples/environment.sh [test]`) to create the environment only.
# PYTHON=/path/to/python: create .venv with this Python. Default: python3, python, then the newest python3.X found.
# AMOS_ENVIRONMENT=active: install nothing, without network; use the active environment ($PYTHON, python or python3).
# It must contain the dependencies; the package and its commands come from the checkout.

CHECKOUT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
ENVIRONMENT="$CHECKOUT/.venv"
ENVIRONMENT_STAMP="$ENVIRONMENT/amos_fairseq.stamp"
INSTALL_LOG="$ENVIRONMENT/install.log"
# The tested versions, as in setup.py, newest first; docs/limits.md lists what was run with each.
PYTHON_VERSIONS="3.13 3.12 3.11 3.10"
# What is installed: the version with which each change is tested. An installed one within the wider bounds of setup.py is used.
TORCH_REQUIREMENT="torch>=2.6,<2.14"

# On busy cores, idle threads that sleep instead of spinning double the throughput (amos_fairseq/process.py).
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"

fail() {
    echo "amos_fairseq: error: $*" >&2
    exit 1
}

# help_of SCRIPT: prints the comment at its head, which ends at its line `set ...`.
help_of() {
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$1"
}

# Below, python -I does not import modules of the current folder.

# Prints "major.minor" of a Python, or nothing where it does not run (a shim of an absent version exists but fails).
python_version_of() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true
}

is_supported() {
    case " $PYTHON_VERSIONS " in *" $1 "*) [ -n "$1" ] ;; *) return 1 ;; esac
}

# Prints the Python to use: only $PYTHON if it is given, so that a mistake in it is noticed.
find_python() {
    local candidate version seen="" candidates
    local needed="needs Python ${PYTHON_VERSIONS// /, }"
    if [ -n "${PYTHON:-}" ]; then
        version="$(python_version_of "$PYTHON")"
        is_supported "$version" || fail "$needed, but PYTHON=$PYTHON ${version:+is }${version:-does not run}: give another one"
        echo "$PYTHON"
        return
    fi
    candidates=(python3 python)
    # In an active environment, python is the environment's own.
    [ "${AMOS_ENVIRONMENT:-}" != active ] || candidates=(python python3)
    for version in $PYTHON_VERSIONS; do
        [ "${AMOS_ENVIRONMENT:-}" = active ] || candidates+=("python$version")
    done
    for candidate in "${candidates[@]}"; do
        version="$(python_version_of "$candidate")"
        if is_supported "$version"; then
            echo "$candidate"
            return
        fi
        [ -z "$version" ] || seen="$seen $candidate is $version;"
    done
    fail "$needed, found${seen:- none;} install one, or give it as PYTHON=/path/to/python3.12"
}

# fairseq is compiled unless PyPI has a wheel (CPython 3.12 on x86-64). Check for a C++ compiler and Python's headers before
# anything is downloaded.
check_build_tools() {
    local python="$1" version compiler header
    version="$(python_version_of "$python")"
    if [ "$version $(uname -m)" != "3.12 x86_64" ]; then
        for compiler in "${CXX:-}" c++ g++ clang++; do
            [ -z "$compiler" ] || ! command -v "${compiler%% *}" >/dev/null || break
            compiler=""
        done
        [ -n "$compiler" ] || fail "no C++ compiler found (c++, g++, clang++ or \$CXX): install one, for example the package g++ or build-essential"
        header="$("$python" -I -c 'import sysconfig; print(sysconfig.get_paths()["include"] + "/Python.h")')"
        [ -f "$header" ] || fail "Python's headers are missing ($header): install the package python$version-dev"
    fi
    "$python" -I -c 'import ensurepip, venv' 2>/dev/null ||
        fail "this Python cannot create environments (no venv or ensurepip): install the package python$version-venv"
}

# Prints the inputs of an up-to-date environment: setup.py's hash, and the checkout, because an environment cannot be moved.
current_stamp() {
    "$ENVIRONMENT/bin/python" -I - "$CHECKOUT" <<'PYTHON' 2>/dev/null || true
import hashlib, pathlib, sys
checkout = pathlib.Path(sys.argv[1])
print("setup.py", hashlib.sha256((checkout / "setup.py").read_bytes()).hexdigest(), "checkout", checkout)
PYTHON
}

# The stamp is written last, so an interrupted installation has none and the next run completes it.
environment_is_ready() {
    local extra="$1" stamp
    [ -x "$ENVIRONMENT/bin/python" ] && [ -f "$ENVIRONMENT_STAMP" ] || return 1
    stamp="$(current_stamp)"
    [ -n "$stamp" ] && [ "$(head -n 1 "$ENVIRONMENT_STAMP")" = "$stamp" ] || return 1
    [ -z "$extra" ] || grep -qx "extra $extra" "$ENVIRONMENT_STAMP"
}

# The environment uses a torch that the machine's Python already has (for example in a vendor's container).
sees_usable_torch() {
    (cd "$CHECKOUT" && "$1" - <<'PYTHON' 2>/dev/null
import importlib.metadata, sys
version = tuple(int(part) for part in importlib.metadata.version("torch").split(".")[:2])
sys.exit(not (sys.prefix == sys.base_prefix and (2, 6) <= version < (2, 16)))
PYTHON
    )
}

# Prints the active Python, or the one that creates or completes .venv: its own, unless $PYTHON is another version.
python_of_environment() {
    local version="" wanted
    [ "${AMOS_ENVIRONMENT:-}" = active ] || version="$(python_version_of "$ENVIRONMENT/bin/python")"
    if [ -z "$version" ]; then
        find_python
        return
    fi
    is_supported "$version" ||
        fail "$ENVIRONMENT has Python $version, but needs ${PYTHON_VERSIONS// /, }: remove that folder and start again"
    if [ -n "${PYTHON:-}" ]; then
        wanted="$(find_python)" || exit 1
        wanted="$(python_version_of "$wanted")"
        [ "$wanted" = "$version" ] ||
            fail "$ENVIRONMENT has Python $version, but PYTHON=$PYTHON is $wanted: remove that folder, or unset PYTHON"
    fi
    echo "$ENVIRONMENT/bin/python"
}

make_environment() {
    local python="$1" options=()
    if [ -e "$ENVIRONMENT" ]; then
        if [ -f "$ENVIRONMENT_STAMP" ] && [ "$(sed -n '1s/.* checkout //p' "$ENVIRONMENT_STAMP")" != "$CHECKOUT" ]; then
            echo "  the checkout was moved: creating .venv again"
            options+=(--clear)
        elif "$ENVIRONMENT/bin/python" -I -m pip --version >/dev/null 2>&1; then
            return
        fi
    fi
    # An environment's Python is a link to the one that created it, and cannot create itself.
    python="$("$python" -I -c 'import os, sys; print(os.path.realpath(sys.executable))')"
    ! sees_usable_torch "$python" || options+=(--system-site-packages)
    echo "  creating .venv with $("$python" --version)"
    "$python" -I -m venv ${options[@]+"${options[@]}"} "$ENVIRONMENT" || fail "python -m venv failed in $ENVIRONMENT (see above)"
}

# The log gets pip's complete output; the terminal shows the lines that indicate progress.
install() {
    local status=0
    (cd "$CHECKOUT" && "$ENVIRONMENT/bin/python" -m pip install --disable-pip-version-check --progress-bar off "$@" 2>&1) |
        tee -a "$INSTALL_LOG" |
        awk '/^ *(Collecting|Downloading|Building wheel|Installing) / { print "    " substr($0, 1, 100); fflush() }' || status=1
    [ "$status" -eq 0 ] || fail "the installation failed: $(grep -i '^error' "$INSTALL_LOG" | tail -n 1 | cut -c 1-200) (complete log: $INSTALL_LOG)"
}

install_everything() {
    local extra="$1" target="."
    # A second run without the extra must not remove it from the stamp.
    if [ -z "$extra" ] && [ -f "$ENVIRONMENT_STAMP" ]; then
        extra="$(sed -n 's/^extra //p' "$ENVIRONMENT_STAMP" | head -n 1)"
    fi
    [ -z "$extra" ] || target=".[$extra]"
    rm -f "$ENVIRONMENT_STAMP"
    : >"$INSTALL_LOG"
    echo "  1/3 build tools and PyTorch (the largest download)"
    # The last step builds without isolation, because fairseq's isolated build downloads another torch.
    install --upgrade pip "setuptools>=77" wheel cython
    install numpy "$TORCH_REQUIREMENT"
    echo "  2/3 fairseq and the rest (fairseq is compiled: one or two minutes)"
    install --no-build-isolation --editable "$target"
    echo "  3/3 testing the imports"
    # fairseq requires torchaudio for speech. PyPI's does not load with a CPU build of torch, and transformers 5 imports it.
    "$ENVIRONMENT/bin/python" -I -c 'import torchaudio' >>"$INSTALL_LOG" 2>&1 ||
        "$ENVIRONMENT/bin/python" -I -m pip uninstall --yes torchaudio >>"$INSTALL_LOG" 2>&1
    "$ENVIRONMENT/bin/python" -I -c '
import amos_fairseq
amos_fairseq.register()  # hides a broken torchaudio of the machine, which pip cannot remove from .venv
import fairseq, matplotlib, sentencepiece, tensorboard, tokenizers, torch
from transformers import AutoModel' >>"$INSTALL_LOG" 2>&1 ||
        fail "what was installed does not import: $(tail -n 1 "$INSTALL_LOG") (complete log: $INSTALL_LOG); remove $ENVIRONMENT and start again"
    { current_stamp; [ -z "$extra" ] || echo "extra $extra"; } >"$ENVIRONMENT_STAMP.part"
    mv "$ENVIRONMENT_STAMP.part" "$ENVIRONMENT_STAMP"
}

# Use the dependencies of the active Python; one line names missing ones.
use_active_environment() {
    local extra="$1" python
    python="$(find_python)" || exit 1
    AMOS_PYTHON="$("$python" -c 'import sys; print(sys.executable)')"
    "$AMOS_PYTHON" "$CHECKOUT/examples/check_environment.py" ${extra:+"$extra"} || exit 1
    export AMOS_PYTHON PYTHONPATH="$CHECKOUT${PYTHONPATH:+:$PYTHONPATH}" PATH="$CHECKOUT/examples/commands:$PATH"
}

# prepare_environment [test]: creates or completes .venv if it is not up to date; needs bash's `set -euo pipefail`.
prepare_environment() {
    local extra="${1:-}" python started=$SECONDS
    case "${AMOS_ENVIRONMENT:-}" in
        "") ;;
        active)
            use_active_environment "$extra"
            return
            ;;
        *) fail "AMOS_ENVIRONMENT=$AMOS_ENVIRONMENT: it must be 'active' or not set" ;;
    esac
    python="$(python_of_environment)" || exit 1
    if ! environment_is_ready "$extra"; then
        check_build_tools "$python"
        echo "environment: $ENVIRONMENT (once; about four minutes and the downloads)"
        make_environment "$python"
        install_everything "$extra"
        echo "environment: ready after $((SECONDS - started)) s"
    fi
    export PATH="$ENVIRONMENT/bin:$PATH"
}

# For scripts that use the commands in PATH: with AMOS_ENVIRONMENT=active, use those of the checkout.
prepare_active_environment() {
    [ "${AMOS_ENVIRONMENT:-}" != active ] || prepare_environment
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    set -euo pipefail
    prepare_environment "${1:-}"
fi
