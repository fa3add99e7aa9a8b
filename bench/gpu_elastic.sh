#!/usr/bin/env bash
# Data movement on a GPU whose memory is too small for all KV: requests so long that layers are offloaded, grown over a
# length at which one more run of layers leaves the card (KV memory is set, within the cap, so that it is DEPTH). Each
# request has a beginning of its own, so host memory holds them all (137 GB by default; with WRITE_THROUGH=offloaded only
# their layers that ever leave, 24 of 32, 102 GB, and each request computes its beginning itself in each repeat); with
# DISTINCT= they share one, which takes 5. Beside it, with a beginning that all share: each set loaded whole, everything
# offloaded, nothing offloaded.
#
#   bench/gpu_elastic.sh BIN_FOLDER MODEL.gguf HEAD.safetensors OUT_FOLDER [OPTION OF `specontext bench`...]
#
# CAP (80G), REQUESTS (32), DEPTH (32768), BUDGET (2048), SELECTION (previous), GENERATE (256 steps around the threshold),
# REPEATS (1), DISTINCT (1), WRITE_THROUGH (all; of the first row alone), BESIDE ("c1 c2 resident"; variants of
# bench/gpu.sh), and SHAPE, DEVICE, MPS, PYTHON, WORK, OUT_FOLDER as there; the first row's folder is
# OUT_FOLDER/threshold, the others' OUT_FOLDER/beside.
set -euo pipefail
[ $# -ge 4 ] || { sed -n '2,14s/^# \{0,1\}//p' "$0" >&2; exit 2; }
bin=$(realpath "$1") model=$(realpath "$2") head=$(realpath "$3") out=$4
shift 4
mkdir -p "$out"
out=$(realpath "$out")
cd "$(dirname "$0")/.."
CAP=${CAP:-80G} REQUESTS=${REQUESTS:-32} DEPTH=${DEPTH:-32768} BUDGET=${BUDGET:-2048} SELECTION=${SELECTION:-previous}
GENERATE=${GENERATE:-256} REPEATS=${REPEATS:-1} DISTINCT=${DISTINCT-1} BESIDE=${BESIDE-c1 c2 resident}
export SHAPE=${SHAPE:-llama-3.1-8b} DEVICE=${DEVICE:-cuda:0} PYTHON=${PYTHON:-python3}
if [ -z "${WORK:-}" ]; then
    WORK=$(mktemp -d)
    trap 'rm -rf "$WORK"' EXIT
fi
export WORK
bench/gpu_model.sh "$bin" "$model" "$head" "$WORK"

# The first requests are ahead of the last by what they decode while those begin, a few steps each or one for each 2048
# tokens of a beginning that is computed; LEAD is half of that; ahead: what bench leaves room for.
WRITE_THROUGH=${WRITE_THROUGH:-all}
ahead=32 lead=48
[ "$WRITE_THROUGH" = all ] || lead=$(((DEPTH / 2048 + 1) * (REQUESTS - 1) / 2))
depth=$((DEPTH - ${LEAD:-$lead} - GENERATE / 2))
[ "$WRITE_THROUGH" = all ] || [ $((depth / 2048 + 2)) -le $ahead ] || ahead=$((depth / 2048 + 2))
context=$(((depth + GENERATE + ahead * (REQUESTS - 1) + 3 + 63) / 64 * 64)) # as bench takes it
keys=()
for ((i = 1; i <= $#; i++)); do
    case ${!i} in
        --key-type=*) keys=("${!i}") ;;
        --key-type) next=$((i + 1)); keys=(--key-type "${!next:-}") ;;
    esac
done
read -r kv threshold layers host < <("$PYTHON" bench/gpu_threshold.py "$DEPTH" "$context" "$CAP" "$bin/specontext" plan \
    -m "$WORK/$SHAPE" -H "$WORK/$SHAPE.head.safetensors" --device "$DEVICE" --requests "$REQUESTS" --budget "$BUDGET" \
    --write-through "$WRITE_THROUGH" ${keys[@]+"${keys[@]}"})
echo "depth $depth, KV memory $((kv >> 20)) MiB: from $threshold tokens on more than $layers layers are offloaded;" \
    "host memory has $host"
failed=0
measure() { # FOLDER DEPTH STEPS VARIANTS [OPTION...]
    local folder=$1
    export DEPTHS=$2 GENERATE=$3 VARIANTS=$4
    shift 4
    BATCHES=$REQUESTS BUDGETS=$BUDGET SELECTIONS=$SELECTION BASELINES='' REPEATS=$REPEATS \
        "$PYTHON" bench/card.py "$DEVICE" bench/gpu.sh "$bin" "$model" "$head" "$folder" --gpu-memory "$CAP" "$@" ||
        failed=1
}
measure "$out/threshold" "$depth" "$GENERATE" all ${DISTINCT:+--distinct} --device-memory "$kv" --write-through "$WRITE_THROUGH" "$@"
[ -z "$BESIDE" ] || measure "$out/beside" "$DEPTH" 32 "all $BESIDE" "$@"
exit $failed
