# Sourced by quickstart and test: make .venv in the checkout and install the package into it.

# make_venv [EXTRA [oldest]]: afterwards $venv/bin/ampctl runs this checkout. Costs nothing if the
# folder was made from this pyproject.toml, in this place, with the extra asked for or with a larger
# one. $venv is .venv, or with `oldest` .venv-oldest, which has the lowest versions that
# pyproject.toml allows.
make_venv() {
    local extra="${1:-}" which="${2:-}" facts python stamp variables=()
    venv=".venv${which:+-$which}"
    stamp="$venv/ampctl-installed"
    facts="$(cksum < pyproject.toml) $PWD"
    if [[ -x "$venv/bin/python" ]]; then
        # "dev" holds all that the plain package needs, so it serves both.
        for done in "$extra" dev; do
            if [[ "$(cat "$stamp" 2> /dev/null)" == "$facts [$done]" ]]; then
                return
            fi
        done
    fi
    python="$(find_python "$which")"
    echo "installing into $venv (only the first time; PyTorch is large)"
    rm -f "$stamp"
    if ! "$python" -m venv "$venv"; then
        echo "error: $python cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2
        exit 1
    fi
    if [[ -n "$which" ]]; then
        "$python" scripts/lower_bounds.py > "$venv/lower-bounds.txt"
        # As variables, for they hold in the environment that builds the package too.
        variables=("PIP_CONSTRAINT=$venv/lower-bounds.txt" "PIP_BUILD_CONSTRAINT=$venv/lower-bounds.txt")
    fi
    env ${variables[@]+"${variables[@]}"} \
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -e ".${extra:+[$extra]}"
    echo "$facts [$extra]" > "$stamp"
}

# find_python [oldest]: print the first Python of 3.11 or newer, or with `oldest` the lowest of them;
# or say what is missing and end.
find_python() {
    local name candidates=(python3 python3.14 python3.13 python3.12 python3.11)
    if [[ -n "${1:-}" ]]; then
        candidates=(python3.11 python3.12 python3.13 python3.14 python3)
    fi
    if [[ -n "${PYTHON:-}" ]]; then
        candidates=("$PYTHON")
    fi
    for name in "${candidates[@]}"; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; then
            echo "$name"
            return
        fi
    done
    {
        echo "error: ampctl needs Python 3.11 or newer; found: $("${candidates[0]}" --version 2>&1 || true)"
        echo "    install one, or name it: PYTHON=/path/to/python3 $0"
    } >&2
    exit 1
}
