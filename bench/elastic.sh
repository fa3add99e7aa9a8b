#!/usr/bin/env bash
# Elastic loading on the demo's document (5,340 tokens): bytes loaded against the bytes that loading every selection
# whole would move, sinks and window left out. Budget 512, every layer offloaded, slots = 1.5 and 3 budgets.
# usage: bench/elastic.sh BIN_FOLDER MODEL
set -eu
bin=$1 model=$2
cd "$(dirname "$0")/.."
report=$(mktemp)
trap 'rm -f "$report"' EXIT
printf '%-6s %-9s %12s %12s %8s %9s %8s\n' slots offloaded 'loaded MB' 'whole MB' share overlap mass
for slots in 768 1536; do
    "$bin/specontext" run -m "$model" -f tests/vectors/demo/document.txt -p "$(cat tests/vectors/demo/question.txt)" \
        --chat -n 64 --ignore-eos --budget 512 --slots $slots -c 5504 --offload-layers 64 --report "$report" \
        > /dev/null 2>&1
    python3 - "$report" "$slots" <<'PY'
import json, sys
r = json.load(open(sys.argv[1]))
print("%-6s %-9d %12.1f %12.1f %7.1f%% %8.1f%% %8.3f" % (
    sys.argv[2], r["layers_offloaded"], r["bytes_loaded"] / 1e6, r["bytes_if_reloaded"] / 1e6,
    100 * r["bytes_loaded"] / r["bytes_if_reloaded"], 100 * r["overlap_mean"], r["mass_mean"]))
PY
done
