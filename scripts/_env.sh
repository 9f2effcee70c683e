# Sourced by the scripts beside it. Sets `root`, `venv` and `python` (the virtual environment's interpreter once
# there is one, until then any Python that is new enough).

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
python=$venv/bin/python

if ! "$python" -c '' 2>/dev/null; then
    python=
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            python=$candidate
            break
        fi
    done
    if [ -z "$python" ]; then
        echo "$(basename "$0"): needs Python 3.11 or newer; install it, or name it: PYTHON=/path/to/python3.11 $0" >&2
        exit 2
    fi
fi
