#!/usr/bin/env bash
# bash examples/benchmark/gpu/bring.sh CARRY [TEXT...]
#
# Make what a GPU machine with Python 3.12, torch and transformers, but without a network, still needs. Needs a network, and
# `amos` in PATH for TEXT.
# CARRY/site.tar.xz: packages, 5 MB. CARRY/data.tar.xz: TEXT, binarized; 180 MB of English are 45 MB. Setting:
#   VOCABULARY=16000   pieces
set -euo pipefail

case "${1:---help}" in
    -h | --help)
        sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"
        exit
        ;;
esac
mkdir -p "$1"
CARRY="$(cd "$1" && pwd)"
shift
WORK="$(mktemp -d)"
trap 'rm -rf "$WORK"' EXIT

FOR_MACHINE=(--only-binary=:all: --python-version 3.12 --implementation cp
    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64)
for name in fairseq-fixed==0.12.3.1 bitarray zstandard tokenizers==0.23.3 sentencepiece==0.2.3 hydra-core==1.3.2 omegaconf==2.3.0 filelock; do
    python3 -m pip download -q --no-deps -d "$WORK/wheels" "${FOR_MACHINE[@]}" "$name"
done
# Source only, pure Python.
python3 -m pip wheel -q --no-deps -w "$WORK/wheels" antlr4-python3-runtime==4.9.3
mkdir "$WORK/site"
for wheel in "$WORK"/wheels/*.whl; do python3 -m zipfile -e "$wheel" "$WORK/site"; done
# What only fairseq's developers need.
find "$WORK/site" -name '*.so*' -exec strip --strip-debug {} + 2>/dev/null || true
rm -rf "$WORK/site/fairseq/examples" "$WORK/site/examples" "$WORK/site/tests" "$WORK"/site/fairseq/models/*/examples
find "$WORK/site" \( -name '__pycache__' -o -name '*.cpp' -o -name '*.cu' -o -name '*.pyx' \) -prune -exec rm -rf {} +
tar cJf "$CARRY/site.tar.xz" -C "$WORK/site" .
if [ $# -gt 0 ]; then
    amos prepare text "$@" --out "$WORK/data" --vocab-size "${VOCABULARY:-16000}" --uncased
    tar cJf "$CARRY/data.tar.xz" -C "$WORK" data
fi
ls -l "$CARRY"
