#!/bin/sh
# Print the first Python >= 3.11 that runs, or explain what is missing.
for candidate in "${PYTHON:-}" python3.11 python3.12 python3.13 python3 python; do
    [ -n "$candidate" ] || continue
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
        echo "$candidate"
        exit 0
    fi
done
echo "error: no Python >= 3.11 with the venv module was found (on Debian and Ubuntu: apt install python3-venv)" >&2
exit 1
