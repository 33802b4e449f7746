# Makes the virtual environment that scripts/run, test and check use. Sourced, never run.
#
# In:  PYTHON (default python3) makes the environment, PCGSVC_VENV (default .venv) says where.
#      PCGSVC_TORCH=VERSION: that torch instead of the pinned one, with the triton that it brings, a
#      setuptools that it takes and the other pins, in an environment of its own (.venv-torch-VERSION).
# Out: `ensure_env [EXTRA]` leaves the environment installed and sets PY to its interpreter.
# Knows nothing of what is run in it.
#
# A later call costs one hash and one comparison. Otherwise one caller at a time installs, behind a
# lock beside the environment. An environment of ours whose installation was cut short is thrown
# away and made again, since pip takes a half-written package for an installed one. Nothing is ever
# thrown away in an environment that somebody else made.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
TORCH=${PCGSVC_TORCH:-}
VENV=${PCGSVC_VENV:-$ROOT/.venv${TORCH:+-torch-$TORCH}}
[[ $VENV == /* ]] || VENV=$PWD/$VENV
PY=$VENV/bin/python
STAMP=$VENV/.pcgsvc-installed

say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }
die() { say "$*"; exit 1; }

_pins() {
    if [[ -z $TORCH ]]; then
        cat "$ROOT/constraints.txt"
    else
        grep -vE '^(torch|triton|setuptools)==' "$ROOT/constraints.txt"
        echo "torch==$TORCH"
    fi
}

# What an installation depends on: the pins, the project, and where the editable install points.
_wanted() { { echo "$ROOT"; cat "$ROOT/pyproject.toml"; _pins; } | sha256sum; }

# The stamp is "HASH - EXTRA"; the base package is there wherever an extra is, and test where
# test-scale is.
_installed() {
    local hash dash extra
    [[ -x $PY && -f $STAMP ]] || return 1
    read -r hash dash extra <"$STAMP" || true
    [[ "$hash  $dash" == "$(_wanted)" && $extra == "$1"* ]]
}

_make_venv() {
    local python=${PYTHON:-python3} ours=$VENV/.pcgsvc-made
    if [[ -d $VENV && -n $(ls -A "$VENV") ]]; then
        if [[ ! -f $ours ]]; then # somebody else's: used as it is
            "$PY" -m pip --version >/dev/null 2>&1 ||
                die "$VENV holds no working virtual environment and was not made here; move it away, or set PCGSVC_VENV."
            return
        fi
        if [[ ! -f $VENV/.pcgsvc-busy ]] && "$PY" -m pip --version >/dev/null 2>&1; then
            return
        fi
        say "$VENV was left half made; starting again."
        rm -f "$STAMP"
        # Not `venv --clear`, which would take our two markers first and might then be cut short.
        find "$VENV" -mindepth 1 -maxdepth 1 ! -name '.pcgsvc-*' -exec rm -rf {} +
    fi
    "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null ||
        die "'$python' says '$("$python" -V 2>&1 | tail -n 1)'; Python 3.11, 3.12 or 3.13 is needed. Set PYTHON, such as PYTHON=python3.12."
    mkdir -p "$VENV"
    touch "$ours" "$VENV/.pcgsvc-busy"
    "$python" -m venv "$VENV"
}

_install() {
    local extra=$1 started=$SECONDS
    _installed "$extra" && return # whoever held the lock did it
    say "installing pcgsvc${extra:+[$extra]}${TORCH:+ with torch $TORCH} into $VENV; torch alone takes minutes the first time."
    _make_venv
    rm -f "$STAMP"
    touch "$VENV/.pcgsvc-busy"
    _pins >"$VENV/.pcgsvc-pins"
    # torch first and by its pin alone, so that nothing else can choose another build of it.
    "$PY" -m pip install -q --disable-pip-version-check -c "$VENV/.pcgsvc-pins" torch
    "$PY" -m pip install -q --disable-pip-version-check -c "$VENV/.pcgsvc-pins" \
        -e "$ROOT${extra:+[$extra]}"
    echo "$(_wanted) $extra" >"$STAMP"
    rm -f "$VENV/.pcgsvc-busy"
    say "installed in $((SECONDS - started)) s."
}

ensure_env() {
    local extra=${1:-}
    _installed "$extra" && return
    mkdir -p "$(dirname "$VENV")"
    (
        flock 9
        _install "$extra"
    ) 9>"$VENV.lock"
}
