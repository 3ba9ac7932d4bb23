#!/usr/bin/env bash
# Images to TFRecords on this machine; needs bash and Python only. See usage() below, or --help.
set -euo pipefail

here=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
venv=$here/.venv
stamp=$venv/tpufeed-ready           # what was installed; there only while the venv is whole
unfinished=$venv/tpufeed-unfinished # there from the first step of an installation to its last

usage() {
    cat <<'END'
usage: ./run_local.sh                       draw sample pictures, make TFRecords of them, check them,
                                            train two epochs on them
       ./run_local.sh 'GLOB' OUT [flags]    the same with your pictures; flags are those of tpufeed ingest
       ./run_local.sh --setup-only [--with train,report]     install into .venv (with extras) and stop

The label of a picture is the name of its folder, so a GLOB ends in */* as a rule; put it in quotes:
       ./run_local.sh 'photos/*/*.jpg' out --image-size 224 --split train=0.9,validation=0.1

PYTHON=/path/to/python chooses the Python (3.10 to 3.13) that .venv is made from.
END
}

fail() { # fail STATUS MESSAGE
    printf 'run_local.sh: error: %s\n' "$2" >&2
    exit "$1"
}

step() {
    printf '== %s\n' "$1"
}

version_of() { # prints MAJOR.MINOR; fails where it is no Python or not from 3.10 to 3.13
    "$1" -c '
import sys
version = sys.version_info[:2]
print("%d.%d" % version)
sys.exit(not (3, 10) <= version <= (3, 13))' 2>/dev/null
}

find_python() { # prints the interpreter to build from
    local candidate
    if [[ -n ${PYTHON:-} ]]; then
        version_of "$PYTHON" >/dev/null ||
            fail 1 "PYTHON=$PYTHON: must be a Python from 3.10 to 3.13; set it to one, or unset it"
        printf '%s\n' "$PYTHON"
        return
    fi
    for candidate in python3.13 python3.12 python3.11 python3.10 python3; do
        # A name on the path is not enough: version managers leave stand-ins that only fail.
        if version_of "$candidate" >/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    fail 1 "python: none from 3.10 to 3.13 found on the path; install one, or set PYTHON=/path"
}

is_current() { # is_current WANTED_FINGERPRINT EXTRAS: whether .venv holds all of it
    local fingerprint installed extra
    [[ -f $stamp && ! -e $unfinished ]] || return 1
    { read -r fingerprint && read -r installed; } <"$stamp" || return 1
    [[ $fingerprint == "$1" ]] || return 1
    for extra in ${2//,/ }; do
        [[ ,$installed, == *",$extra,"* ]] || return 1
    done
}

is_usable() { # whether .venv can be installed into: whole, not moved, and of the wanted Python
    local version wanted
    [[ -d $venv && ! -e $unfinished ]] || return 1
    version=$(version_of "$venv/bin/python") || return 1
    # The scripts of a venv hold its path, so a moved or copied one calls the old place.
    grep -qF -- "$venv" "$venv/bin/activate" || return 1
    [[ -z ${PYTHON:-} ]] && return
    wanted=$(version_of "$PYTHON") || return 1
    [[ $version == "$wanted" ]]
}

join_extras() { # join_extras LIST LIST: every extra that is in one of them, with commas between
    local extra joined=''
    for extra in train report test; do
        [[ ,$1,$2, == *",$extra,"* ]] && joined=$joined,$extra
    done
    printf '%s\n' "${joined#,}"
}

make_venv() {
    local python version
    python=$(find_python)
    version=$(version_of "$python")
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail 1 "$python: has no venv module; install it (Debian: python$version-venv), or set PYTHON=/path"
    step "making .venv with Python $version"
    rm -rf -- "$venv"
    mkdir -- "$venv"
    : >"$unfinished"
    "$python" -m venv "$venv" || fail 1 "$venv: could not be made; the reason is above"
}

set_up() { # set_up EXTRAS
    local extras=$1 fingerprint
    if [[ -n ${PYTHON:-} ]]; then
        find_python >/dev/null
    fi
    fingerprint=$(cd -- "$here" && cat setup.py constraints.txt pipeline/__init__.py | cksum)
    if ! is_usable; then
        make_venv
    elif is_current "$fingerprint" "$extras"; then
        return
    elif [[ -f $stamp ]]; then
        extras=$(join_extras "$(sed -n 2p "$stamp")" "$extras") # what an earlier call brought stays
    fi
    : >"$unfinished"
    step "installing into .venv (first time: a few minutes)"
    if ! (cd -- "$here" && ./.venv/bin/python -m pip install --quiet --no-input \
        --disable-pip-version-check -c constraints.txt -e ".${extras:+[$extras]}") >"$venv/install.log" 2>&1; then
        tail -n 20 -- "$venv/install.log" >&2
        fail 1 "pip install: failed as above; all it said is in $venv/install.log; start again to retry"
    fi
    printf '%s\n%s\n' "$fingerprint" "$extras" >"$stamp"
    rm -f -- "$unfinished"
}

convert() { # convert GLOB OUT [flags]
    local glob=$1 out=$2
    shift 2
    step "tpufeed ingest --input '$glob' --output $out $*"
    "$venv/bin/tpufeed" ingest --input "$glob" --output "$out" "$@"
    step "tpufeed verify $out"
    "$venv/bin/tpufeed" verify "$out"
    step "tpufeed inspect $out"
    "$venv/bin/tpufeed" inspect "$out"
}

name_files() { # name_files OUT
    step "done"
    printf '%-36s %s\n' \
        "pictures, ready for training:" "$1/*.tfrecord" \
        "classes, splits, shards, checksums:" "$1/dataset.json" \
        "a row for each record, its source:" "$1/index/" \
        "the files left out, and why:" "$1/rejects.jsonl"
}

run_sample() {
    cd -- "$here"
    if [[ -d sample/images ]]; then
        step "using the pictures in sample/images"
    else
        step "drawing sample pictures into sample/images (some 15 seconds)"
        mkdir -p sample
        # It draws beside that folder and renames at the end, so a folder of this name is whole.
        .venv/bin/python -m pipeline.samples sample/images
    fi
    convert 'sample/images/*/*' sample/tfrecords --image-size 192 \
        --split train=0.8,validation=0.2 --max-reject-rate 0.05 --overwrite
    train_on sample/tfrecords sample/run
    name_files "$here/sample/tfrecords"
}

train_on() { # train_on DATA RUN: two epochs, the second far above chance
    local flags=(--model convnet --image-size 96 --epochs 2 --batch-size 16
        --optimizer adam --learning-rate 0.002)
    step "tpufeed train --data $1 ${flags[*]} --output $2"
    rm -rf -- "$2"
    "$venv/bin/tpufeed" train --data "$1" "${flags[@]}" --output "$2"
}

main() {
    local extras=''
    case ${1:-} in
    -h | --help)
        usage
        ;;
    --setup-only)
        if (($# == 3)) && [[ $2 == --with ]]; then
            extras=$3
        elif (($# != 1)); then
            fail 2 "--setup-only: takes nothing but --with EXTRA[,EXTRA]; see ./run_local.sh --help"
        fi
        [[ $extras =~ ^((train|report|test)(,(train|report|test))*)?$ ]] ||
            fail 2 "--with $extras: must be of train, report and test, with commas between"
        set_up "$extras"
        ;;
    '')
        (($# == 0)) || fail 2 "GLOB: must not be empty; see ./run_local.sh --help"
        set_up train
        run_sample
        ;;
    -*)
        fail 2 "$1: unknown flag; GLOB and OUT come first, see ./run_local.sh --help"
        ;;
    *)
        (($# >= 2)) && [[ -n $2 && $2 != -* ]] ||
            fail 2 "OUT: missing after the glob $1; name the folder for the TFRecords"
        # A glob without quotes arrives as many names, of which the second would be overwritten.
        (($# == 2)) || [[ $3 == -* ]] ||
            fail 2 "$3: is neither GLOB nor OUT nor a flag; put the glob in quotes: './photos/*/*'"
        set_up ''
        convert "$@"
        name_files "$2"
        ;;
    esac
}

main "$@"
