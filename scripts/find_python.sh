#!/usr/bin/env bash
# Prints a Python 3.11-3.13 that works; 3.11 first, because the pinned CPU build of torch is smallest there.
# PYTHON=... overrides the search.
set -u
works() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}
for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3.13 python3 python; do
    if command -v "$candidate" >/dev/null 2>&1 && works "$candidate"; then
        "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' ||
            echo "note: this is not Python 3.11; torch may come as its CUDA build, several GB" >&2
        command -v "$candidate"
        exit 0
    fi
done
echo "error: no Python 3.11, 3.12 or 3.13 with venv found; install one (Debian, Ubuntu: apt-get install python3.11-venv)" \
     "or name it: make PYTHON=/path/to/python3.11 <target>" >&2
exit 1
