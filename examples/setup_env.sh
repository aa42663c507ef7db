#!/usr/bin/env bash
# Make .venv at the root of the repository and install megatron_gdn in it; quick when nothing changed.
#
#   examples/setup_env.sh [EXTRA]     EXTRA: an extra of setup.py; default test, dev adds the lint tools
#
#   PYTHON=/path/to/python3.12        use this interpreter instead of searching for one
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$ROOT/.venv
STATE=$VENV/.setup_env # what is installed, or "installing" while that is not yet true
PROBE='import sys
print("%d.%d.%d %s" % (sys.version_info[:3] + (getattr(sys, "base_prefix", sys.prefix),)))
sys.stdout.flush()
import ensurepip, venv'

say() { printf 'setup: %s\n' "$*" >&2; }

die() {
    say "error: $*"
    exit 1
}

# Print "VERSION PREFIX" of the interpreter $1. If it does not suit, print why and fail.
# A name on PATH proves nothing (it may be a shim of another version manager), so it is run.
probe() {
    local path out version major minor status=0
    path=$(command -v -- "$1") || {
        echo "not found"
        return 1
    }
    out=$("$path" -c "$PROBE" 2>/dev/null </dev/null) || status=$?
    if [[ ! $out =~ ^([0-9]+)\.([0-9]+)\.[0-9]+' ' ]]; then
        echo "does not run"
        return 1
    fi
    version=${out%% *} major=${BASH_REMATCH[1]} minor=${BASH_REMATCH[2]}
    if ((major != 3 || minor < 12 || minor > 13)); then
        echo "is Python $version"
        return 1
    elif ((status != 0)); then
        echo "is Python $version without the venv module"
        return 1
    fi
    echo "$out"
}

# Print the first interpreter that suits.
find_python() {
    local name reason tried=()
    for name in python3.12 python3.13 python3 "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/3.1[23]*/bin/python; do
        [[ $name != /* || -x $name ]] || continue
        if reason=$(probe "$name"); then
            command -v -- "$name"
            return
        fi
        tried+=("$name $reason")
    done
    reason=$(printf '%s, ' "${tried[@]}")
    die "no Python 3.12 or 3.13 with venv (${reason%, }); install one (Debian, Ubuntu: python3.12 and" \
        "python3.12-venv; pyenv: pyenv install 3.12), or set PYTHON=/path/to/python3.12."
}

# What a finished install of the extra $1 with the interpreter $2 ("VERSION PREFIX") leaves in STATE.
state_for() {
    local files
    files=$(cat "$ROOT/setup.py" "$ROOT/tests/constraints.txt" | cksum)
    printf '%s\n' "$ROOT" "$2" "$files" "$1"
}

# Whether .venv has the extra $1 of the files as they are now. WANTED: "VERSION PREFIX" of $PYTHON, if set.
is_ready() {
    local state python
    state=$(cat "$STATE" 2>/dev/null) && python=$(probe "$VENV/bin/python") || return 1
    [[ -z $WANTED || $WANTED == "$python" ]] || return 1
    [[ $state == "$(state_for "$1" "$python")" || $state == "$(state_for dev "$python")" ]]
}

# Whether installing into .venv as it stands can be trusted; if not, print why.
is_sound() {
    local python state
    state=$(cat "$STATE" 2>/dev/null) || state=$ROOT # made by hand: believed if it works
    if ! python=$(probe "$VENV/bin/python"); then
        echo "its interpreter $python"
    elif [[ -n $WANTED && $WANTED != "$python" ]]; then
        echo "it has Python ${python%% *}, PYTHON says ${WANTED%% *} in ${WANTED#* }"
    elif [[ $state == installing ]]; then
        echo "an earlier set-up did not finish"
    elif [[ ${state%%$'\n'*} != "$ROOT" ]]; then
        echo "it was made in ${state%%$'\n'*}"
    elif ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        echo "it has no pip"
    else
        return 0
    fi
    return 1
}

make_venv() {
    local python
    python=${PYTHON:-}
    [[ -n $python ]] || python=$(find_python) || exit 1
    mkdir -p "$VENV"
    find "$VENV/" -mindepth 1 -delete # not the folder: it may be a link to another disk
    echo installing >"$STATE"
    say "making .venv with $python (first time: a few minutes) ..."
    "$python" -m venv "$VENV" || die "$python -m venv failed; its message is above."
}

install() {
    local reason
    if [[ ! -e $VENV ]]; then
        make_venv
    elif ! reason=$(is_sound); then
        if [[ -L $VENV && $reason == "it was made in "* ]]; then # may be in use there
            die ".venv is a link to $(readlink "$VENV"), and $reason; remove the link, or what it leads to."
        fi
        say "making .venv anew: $reason"
        make_venv
    fi
    echo installing >"$STATE"
    say "installing torch, megatron-core and the rest (about 3 GB to fetch the first time) ..."
    "$VENV/bin/python" -m pip install -qq --no-input --disable-pip-version-check \
        --editable "${ROOT}[$1]" --constraint "$ROOT/tests/constraints.txt" </dev/null ||
        die "pip failed; its message is above. Run the same command again once that is solved."
    state_for "$1" "$(probe "$VENV/bin/python")" >"$STATE.new"
    mv "$STATE.new" "$STATE"
    say "ready: .venv has Python $("$VENV/bin/python" -c 'import platform; print(platform.python_version())')"
}

setup_env() {
    local extra=${1:-test}
    WANTED=
    if [[ -n ${PYTHON:-} ]] && ! WANTED=$(probe "$PYTHON"); then
        die "PYTHON=$PYTHON $WANTED; Python 3.12 or 3.13 with venv is needed. Set PYTHON to one, or unset it."
    fi
    if is_ready "$extra"; then return; fi
    # One set-up at a time; the second finds the work of the first. Without flock (macOS) nothing guards that.
    (
        if command -v flock >/dev/null && ! flock --nonblock 9; then
            say "another set-up of this folder is running; waiting for it ..."
            flock 9
        fi
        if is_ready "$extra"; then exit; fi
        install "$extra"
    ) 9>"$ROOT/.venv.lock"
}

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then setup_env "$@"; fi
