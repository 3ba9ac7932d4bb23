#!/usr/bin/env bash
# Images to TFRecords on Google Cloud Dataflow. See usage() below, or --help.
set -euo pipefail

here=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)

# Defaults; set any of them in the environment.
JOB_NAME=${JOB_NAME-tpufeed-$(date -u +%Y%m%d-%H%M%S)}
WAIT=${WAIT-1}                       # 0: return once the job is submitted
MAX_WORKERS=${MAX_WORKERS-20}        # machines at most; what bounds the bill
MACHINE_TYPE=${MACHINE_TYPE-}        # empty: Dataflow chooses
SDK_IMAGE=${SDK_IMAGE-}              # a worker image of docker/worker.Dockerfile
SETUP_FILE=${SETUP_FILE-$here/setup.py} # what workers install where there is no SDK_IMAGE
LABELS=${LABELS-}                    # key=value,key=value
SERVICE_ACCOUNT=${SERVICE_ACCOUNT-}  # of the workers
NETWORK=${NETWORK-}
SUBNETWORK=${SUBNETWORK-}
PUBLIC_IPS=${PUBLIC_IPS-1}           # 0: workers have none; needs Private Google Access
FLEXRS=${FLEXRS-0}                   # 1: cheaper, starts within six hours
TPUFEED=${TPUFEED-}                  # an installed tpufeed; empty: that of .venv, set up if need be

usage() {
    cat <<'END'
usage: PROJECT=my-project REGION=us-central1 BUCKET=my-bucket \
       INPUT='gs://my-bucket/photos/*/*.jpg' OUTPUT=gs://my-bucket/records \
       ./run_dataflow.sh [--dry-run] [flags of tpufeed ingest] [options of Beam]

--dry-run prints the job that would be sent, as JSON, and sends nothing. Flags and options come last
and so prevail over the variables.

PROJECT, REGION     where the job runs           BUCKET           for staged and temporary files
INPUT, OUTPUT       as --input and --output of tpufeed ingest; more --input can follow as flags
WAIT=0              returns once the job is submitted; its id is on the last line
SDK_IMAGE=IMAGE     workers start from this image, and install nothing
SETUP_FILE=PATH     setup.py of what workers install otherwise (that of this folder)
JOB_NAME, LABELS=key=value,key=value, MAX_WORKERS (20), MACHINE_TYPE, SERVICE_ACCOUNT, NETWORK,
SUBNETWORK, PUBLIC_IPS=0, FLEXRS=1, TPUFEED=/path/to/tpufeed: see docs/dataflow.md
END
}

fail() { # fail STATUS MESSAGE
    printf 'run_dataflow.sh: error: %s\n' "$2" >&2
    exit "$1"
}

require() { # require NAME MEANING EXAMPLE
    [[ -n ${!1:-} ]] || fail 2 "$1: not set; it is $2, as in $1=$3"
}

check_switch() { # check_switch NAME
    [[ ${!1} == [01] ]] || fail 2 "$1=${!1}: must be 0 or 1"
}

check_values() {
    require PROJECT "the Google Cloud project that runs the job" my-project
    require REGION "the region of the workers" us-central1
    require BUCKET "the bucket for staged and temporary files" my-bucket
    require INPUT "the glob or CSV of the images" "'gs://my-bucket/photos/*/*.jpg'"
    require OUTPUT "the folder for the TFRecords" gs://my-bucket/records
    check_switch WAIT
    check_switch PUBLIC_IPS
    check_switch FLEXRS
    [[ $MAX_WORKERS =~ ^[1-9][0-9]*$ ]] || fail 2 "MAX_WORKERS=$MAX_WORKERS: must be 1 or more"
    [[ -n $SDK_IMAGE || -f $SETUP_FILE ]] || fail 2 "SETUP_FILE=$SETUP_FILE: no such file"
}

make_command() { # sets command to what submits the job
    local folder=gs://${BUCKET#gs://} label labels
    command=("$TPUFEED" ingest "--input=$INPUT" "--output=$OUTPUT" --runner=DataflowRunner
        "--project=$PROJECT" "--region=$REGION" "--job_name=$JOB_NAME"
        "--temp_location=${folder%/}/tpufeed/temp"
        "--staging_location=${folder%/}/tpufeed/staging"
        "--max_num_workers=$MAX_WORKERS")
    if [[ -n $SDK_IMAGE ]]; then
        command+=("--sdk_container_image=$SDK_IMAGE" --sdk_location=container)
    else
        command+=("--setup_file=$SETUP_FILE")
    fi
    IFS=, read -r -a labels <<<"$LABELS"
    for label in ${labels[@]+"${labels[@]}"}; do
        command+=("--labels=$label")
    done
    [[ -z $MACHINE_TYPE ]] || command+=("--machine_type=$MACHINE_TYPE")
    [[ -z $SERVICE_ACCOUNT ]] || command+=("--service_account_email=$SERVICE_ACCOUNT")
    [[ -z $NETWORK ]] || command+=("--network=$NETWORK")
    [[ -z $SUBNETWORK ]] || command+=("--subnetwork=$SUBNETWORK")
    ((PUBLIC_IPS)) || command+=(--no_use_public_ips)
    ((!FLEXRS)) || command+=(--flexrs_goal=COST_OPTIMIZED)
    ((WAIT)) || command+=(--no_wait_until_finish)
}

main() {
    local dry_run=''
    case ${1:-} in
    -h | --help)
        usage
        return
        ;;
    --dry-run)
        dry_run=--dry_run=True
        shift
        ;;
    esac
    check_values
    if [[ -z $TPUFEED ]]; then
        "$here/run_local.sh" --setup-only >&2
        TPUFEED=$here/.venv/bin/tpufeed
    fi
    make_command
    command+=(${dry_run:+"$dry_run"} "$@")
    printf '==' >&2
    printf ' %q' "${command[@]}" >&2
    printf '\n' >&2
    exec "${command[@]}"
}

main "$@"
