#!/usr/bin/env bash
# The large model that the scripts here measure, made by tools/inflate unless it is there already.
#
#   bench/gpu_model.sh BIN_FOLDER MODEL.gguf HEAD.safetensors WORK
#
# SHAPE (llama-3.1-8b), PYTHON (python3). Makes WORK/SHAPE, a folder, and WORK/SHAPE.head.safetensors.
set -euo pipefail
[ $# = 4 ] || { sed -n '2,6s/^# \{0,1\}//p' "$0" >&2; exit 2; }
bin=$(realpath "$1") model=$(realpath "$2") head=$(realpath "$3") work=$(realpath "$4") SHAPE=${SHAPE:-llama-3.1-8b}
cd "$(dirname "$0")/.."
# The head is written last.
[ -e "$work/$SHAPE.head.safetensors" ] ||
    "${PYTHON:-python3}" tools/inflate/inflate.py -m "$model" -o "$work/$SHAPE" --shape "$SHAPE" --head "$head" \
        --head-out "$work/$SHAPE.head.safetensors" --specontext "$bin/specontext"
