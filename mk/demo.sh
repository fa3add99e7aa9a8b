#!/usr/bin/env bash
# The demo: a question about a long text, answered by three processes, with a fraction of the text attended.
set -eu
cd "$(dirname "$0")/.."

text=tests/vectors/demo/document.txt
question=$(cat tests/vectors/demo/question.txt)
report=build/demo.json

echo "text:     $text, $(wc -w <"$text") words"
echo "question: $question"
echo
build/bin/specontext run -m models/SmolLM2-135M-Instruct.Q4_1.gguf --chat -f "$text" -p "$question" \
    --budget 1024 -n 64 --report "$report"
echo
python3 - "$report" <<'PY'
import json, sys
r = json.load(open(sys.argv[1]))
parts = r["processes"]
print("processes:", ", ".join(f"{name} {pid}" for name, pid in sorted(parts.items())))
print(f"attended:  {r['attended_mean']:.0f} of {r['prompt_tokens']} prompt tokens, budget {r['budget']},",
      f"context {r['context']}")
assert len(set(parts.values())) == 4, "the parts are not processes of their own"
assert r["attended_mean"] <= r["budget"] < r["prompt_tokens"], "more was attended than the budget allows"
assert r["generated_tokens"] > 0, "no answer"
PY
