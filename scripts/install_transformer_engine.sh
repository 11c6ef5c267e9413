#!/usr/bin/env bash
# Installs Transformer Engine on a GPU host that has CUDA 13, torch and nvcc, and no network.
#
#   scripts/install_transformer_engine.sh [--join-only] FOLDER
#
# FOLDER holds, carried there from a host with network (`pip download --no-deps`):
#   transformer_engine-V-*.whl, transformer_engine_cu13-V-*.whl   the library
#   transformer_engine_torch-V.tar.gz                              its torch extension, compiled here
#   any other *.whl                                                Python packages that this host lacks
# A file too large to carry whole may come in pieces NAME.part-aa, NAME.part-ab, ... (`split -b 45M NAME NAME.part-`)
# beside NAME.sha256 (`sha256sum NAME`). --join-only joins them and stops. PYTHON names the interpreter, MAX_JOBS the
# number of compilers.
set -euo pipefail

PYTHON=${PYTHON:-python3}

fail() {
    echo "error: $*" >&2
    exit 2
}

join_pieces() { # NAME.part-* -> NAME, in the order of the suffixes
    local first name
    for first in "$1"/*.part-aa; do
        [ -e "$first" ] || continue
        name=${first%.part-aa}
        [ -e "$name.sha256" ] || fail "$name.sha256 is missing, so the joined file could not be checked; carry it too"
        cat "$name".part-* >"$name.joining"
        if [ "$(sha256sum <"$name.joining" | cut -d' ' -f1)" != "$(cut -d' ' -f1 "$name.sha256")" ]; then
            rm -f "$name.joining"
            fail "$name: the joined pieces do not have the checksum of $name.sha256; carry all pieces again"
        fi
        mv "$name.joining" "$name"
        rm -f "$name".part-*
        echo "joined $(basename "$name")"
    done
    for first in "$1"/*.part-*; do
        [ -e "$first" ] || continue
        fail "$first has no piece ${first%.part-*}.part-aa before it; carry the missing pieces"
    done
}

only_file() { # FOLDER PATTERN -> the one file that matches
    local found
    mapfile -t found < <(compgen -G "$1/$2")
    [ "${#found[@]}" -gt 0 ] || fail "no $2 in $1; download it where there is network: pip download --no-deps ${2%%-*}"
    [ "${#found[@]}" -eq 1 ] || fail "several files match $1/$2: ${found[*]##*/}; leave one"
    echo "${found[0]}"
}

version_of() { # transformer_engine_torch-2.20.2.tar.gz -> 2.20.2
    basename "$1" | sed -E 's/^[A-Za-z0-9_]+-([0-9][0-9A-Za-z.]*[0-9A-Za-z])(-.*|\.tar\.gz)$/\1/'
}

find_toolkit() { # exports CUDA_HOME, and CPATH with the headers of CUDA libraries that are Python packages
    if [ -z "${CUDA_HOME:-}" ] && command -v nvcc >/dev/null; then # that may be a wrapper in another folder
        CUDA_HOME=$(nvcc --dryrun -x cu /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p')
    fi
    CUDA_HOME=$(realpath -m "${CUDA_HOME:-/usr/local/cuda}")
    [ -x "$CUDA_HOME/bin/nvcc" ] ||
        fail "nvcc is neither on PATH nor in CUDA_HOME=$CUDA_HOME; install the CUDA 13 toolkit"
    local packages folder header
    packages=$("$PYTHON" -c 'import os, torch; print(os.path.dirname(torch.__path__[0]))')
    for folder in "$packages"/nvidia/*/include; do
        [ ! -d "$folder" ] || CPATH=${CPATH:+$CPATH:}$(realpath "$folder")
    done
    export CUDA_HOME CPATH=${CPATH:-}
    for header in cuda_runtime_api.h cublas_v2.h cusolverDn.h cudnn.h; do
        echo "#include <$header>" | c++ -x c++ -M -I"$CUDA_HOME/include" - >/dev/null 2>&1 ||
            fail "there is no $header, neither in $CUDA_HOME/include nor beside torch; install that library's headers"
    done
}

check_host() {
    command -v "$PYTHON" >/dev/null || fail "PYTHON=$PYTHON is not there; name a Python that has torch"
    "$PYTHON" -c 'import torch' 2>/dev/null || fail "$PYTHON has no torch; name one that has it: PYTHON=..."
    local cuda
    cuda=$("$PYTHON" -c 'import torch; print(torch.version.cuda or "none")')
    case $cuda in
        13.*) ;;
        *) fail "torch was built for CUDA $cuda; transformer_engine_cu13 needs one for CUDA 13" ;;
    esac
    command -v c++ >/dev/null || fail "there is no C++ compiler (c++); install g++"
    find_toolkit
}

install_wheels() { # FOLDER: other packages first, those that are there already stay as they are
    local wheel name
    for wheel in "$1"/*.whl; do
        [ -e "$wheel" ] || continue
        name=$(basename "$wheel")
        case $name in transformer_engine*) continue ;; esac
        if "$PYTHON" -m pip show --quiet "${name%%-*}" 2>/dev/null; then
            echo "keeping the installed ${name%%-*}"
        else
            "$PYTHON" -m pip install --no-index --no-deps "$wheel"
        fi
    done
}

check_packages() { # what the build and Transformer Engine import, and --no-deps does not bring
    local missing
    missing=$("$PYTHON" - <<'PY'
from importlib.util import find_spec

needed = "setuptools wheel packaging pydantic einops onnx onnxscript nvdlfw_inspect"
print(*(name for name in needed.split() if find_spec(name) is None))
PY
    )
    [ -z "$missing" ] || fail "Transformer Engine needs Python packages that are not installed: $missing; carry their wheels"
}

main() {
    local join_only=
    if [ "${1:-}" = --join-only ]; then
        join_only=yes
        shift
    fi
    [ $# -eq 1 ] || fail "usage: install_transformer_engine.sh [--join-only] FOLDER"
    [ -d "$1" ] || fail "$1 is not a folder; name the one that holds the wheels"
    local folder
    folder=$(cd "$1" && pwd)
    join_pieces "$folder"
    [ -z "$join_only" ] || return 0

    local common cuda extension file
    common=$(only_file "$folder" 'transformer_engine-*.whl')
    cuda=$(only_file "$folder" 'transformer_engine_cu13-*.whl')
    extension=$(only_file "$folder" 'transformer_engine_torch-*.tar.gz')
    for file in "$cuda" "$extension"; do
        [ "$(version_of "$file")" = "$(version_of "$common")" ] ||
            fail "$(basename "$file") is not of version $(version_of "$common") as $(basename "$common"); take one version"
    done
    check_host
    install_wheels "$folder"
    check_packages
    "$PYTHON" -m pip install --no-index --no-deps "$common" "$cuda"
    # FORCE_BUILD: else its setup tries to download a finished wheel first
    NVTE_PYTORCH_FORCE_BUILD=TRUE NVTE_FRAMEWORK=pytorch MAX_JOBS=${MAX_JOBS:-$(nproc)} \
        "$PYTHON" -m pip install --no-index --no-deps --no-build-isolation "$extension"
    "$PYTHON" -c 'import transformer_engine.pytorch, transformer_engine as te; print("installed Transformer Engine", te.__version__)'
}

main "$@"
