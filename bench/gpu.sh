#!/usr/bin/env bash
# On a machine with a GPU: a model of Llama-3.1-8B's shape that computes what SmolLM2 does (tools/inflate), decoded by
# our daemons and by transformers at the same batches and depths, one table.
#
#   bench/gpu.sh BIN_FOLDER MODEL.gguf HEAD.safetensors OUT_FOLDER [OPTION OF `specontext bench`...]
#
# SHAPE (llama-3.1-8b), BATCHES ("1 4"), BASELINE_BATCHES (the same), DEPTHS ("16384"), GENERATE (32), REPEATS (3),
# BUDGETS ("2048"), SELECTIONS ("current previous"), VARIANTS ("all"), DEVICE (cuda:0), MPS (1: ours under NVIDIA's
# multi-process service), BASELINES ("eager,sdpa"; empty: none), PYTHON (python3, with torch and transformers). Variants:
# all; full (attention over everything); c1 (sets of the head, all layers offloaded, each set loaded whole), c2 (elastic
# loading besides; all offloads only what the memory demands besides), resident (nothing offloaded). Depths of a setting
# are measured by one start of the daemons, with one prefill each.
# OUT_FOLDER gets one JSON file a setting, table.md, and targets.md (figures against what is wanted); the model (16 GB)
# goes to WORK (a temporary folder, removed at the end; name one to keep it for the next call). Exit code 1: some setting
# failed, and the table lacks it.
set -euo pipefail
[ $# -ge 4 ] || { sed -n '2,15s/^# \{0,1\}//p' "$0" >&2; exit 2; }
bin=$(realpath "$1") model=$(realpath "$2") head=$(realpath "$3") out=$4
shift 4
mkdir -p "$out"
out=$(realpath "$out")
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3} SHAPE=${SHAPE:-llama-3.1-8b} DEVICE=${DEVICE:-cuda:0} GENERATE=${GENERATE:-32}
REPEATS=${REPEATS:-3} VARIANTS=${VARIANTS:-all}
BATCHES=${BATCHES:-1 4} DEPTHS=${DEPTHS:-16384} BUDGETS=${BUDGETS:-2048} SELECTIONS=${SELECTIONS:-current previous}
BASELINES=${BASELINES-eager,sdpa} BASELINE_BATCHES=${BASELINE_BATCHES:-$BATCHES}
under=()
[ "${MPS:-0}" = 0 ] || under=("$PYTHON" bench/mps.py)
if [ -z "${WORK:-}" ]; then
    WORK=$(mktemp -d)
    trap 'rm -rf "$WORK"' EXIT
fi
large=$WORK/$SHAPE large_head=$WORK/$SHAPE.head.safetensors
SHAPE=$SHAPE PYTHON=$PYTHON bench/gpu_model.sh "$bin" "$model" "$head" "$WORK"

failed=0
ours() { # BATCH BUDGET SELECTION VARIANT [OPTION...]
    local name=ours-$1-$2-$3-$4
    local arguments=(--requests "$1" --budget "$2" --selection "$3")
    shift 4
    "${under[@]}" "$bin/specontext" bench -m "$large" -H "$large_head" --device "$DEVICE" --prompt 0 --depth "${DEPTHS// /,}" \
        --generate "$GENERATE" --repeats "$REPEATS" --json "${arguments[@]}" "$@" \
        >"$out/$name.json" 2>"$out/$name.err" || { echo "$name: $(tail -n 1 "$out/$name.err")" >&2; failed=1; }
}
for batch in $BATCHES; do for budget in $BUDGETS; do for selection in $SELECTIONS; do for variant in $VARIANTS; do
    case $variant in
        all) how=() ;;
        full) how=(--attention full) ;;
        c1) how=(--offload-layers 256 --no-elastic) ;;
        c2) how=(--offload-layers 256) ;;
        resident) how=(--no-offload) ;;
        *) echo "VARIANTS: found $variant, expected all, full, c1, c2 or resident" >&2; exit 2 ;;
    esac
    ours "$batch" "$budget" "$selection" "$variant" "${how[@]}" "$@"
done; done; done; done
: >"$out/baselines.jsonl"
if [ -n "$BASELINES" ]; then
    "$PYTHON" bench/baselines/hf_decode.py -m "$large" --attention "$BASELINES" --batch "${BASELINE_BATCHES// /,}" \
        --depth "${DEPTHS// /,}" --generate "$GENERATE" --device "$DEVICE" \
        >"$out/baselines.jsonl" 2>"$out/baselines.err" || { tail -n 3 "$out/baselines.err" >&2; failed=1; }
fi
"$PYTHON" bench/gpu_table.py "$out" | tee "$out/table.md"
"$PYTHON" bench/gpu_targets.py "$out" | tee "$out/targets.md" || true # missed targets are told, not an error
exit $failed
