#!/usr/bin/env bash
# What the default of each choice of a selection is worth: heads, pooling, sinks and window, which token's set a step
# takes, lists by mass; what the best sets would do; each at two budgets, all on the same positions of the same texts.
#
#   bench/heads.sh BIN_FOLDER MODEL.gguf HEAD.safetensors TEXT... [-- OPTION OF `specontext eval`...]
#
# HEADS: other heads to set beside it (default: heads/alternatives/*.safetensors). BUDGETS ("512 1024").
set -euo pipefail
[ $# -ge 4 ] || { sed -n '2,7s/^# \{0,1\}//p' "$0" >&2; exit 2; }
bin=$1 model=$2 head=$3
shift 3
texts=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do texts+=(-f "$1"); shift; done
[ $# -eq 0 ] || shift
variants=()
for budget in ${BUDGETS:-512 1024}; do
    for other in ${HEADS-$(ls heads/alternatives/*.safetensors)}; do
        variants+=("head=$other,budget=$budget" "head=$other,oracle=groups,budget=$budget")
    done
    # Sinks, window and selections alter what is attended beside what the head picks.
    for change in pool=max sinks=0 sinks=16 window=16 window=256 selection=previous selection=mixed \
        min-mass=0.9 min-mass=0.95 top-p=0.9 top-p=0.95 pins=0.25 oracle=heads oracle=groups; do
        variants+=("$change,budget=$budget")
    done
done
budgets=${BUDGETS:-512 1024}
exec "$bin/specontext" eval -m "$model" -H "$head" -H bootstrap -H newest -b "${budgets// /,}" \
    --variant "${variants[@]}" "${texts[@]}" "$@"
