#!/usr/bin/env bash
# What each part of the design gives: full attention; sets of the head with all KV on the host, each loaded whole;
# elastic loading; offloading only what the memory demands; and, where everything fits, nothing offloaded.
#
#   bench/ablation.sh BIN_FOLDER MODEL.gguf HEAD.safetensors OUT_FOLDER [OPTION OF `specontext bench`...]
#
# Variables as bench/gpu.sh, which this calls; other defaults: BATCHES ("4"), SELECTIONS ("current"), BASELINES ("eager").
# A variant that the card cannot hold is told by one line and missing in the table.
set -euo pipefail
[ $# -ge 4 ] || { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }
export BATCHES=${BATCHES:-4} SELECTIONS=${SELECTIONS:-current} BASELINES=${BASELINES-eager}
export VARIANTS=${VARIANTS:-full c1 c2 all resident}
exec "$(dirname "$0")/gpu.sh" "$@"
