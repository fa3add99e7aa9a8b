#!/usr/bin/env python3
"""The table of bench/gpu.sh: gpu_table.py FOLDER. Ratios are to transformers' fastest attention at the same batch
and depth; above 1 is in our favour."""
import glob
import json
import os
import sys


def ours(folder):
    for path in sorted(glob.glob(os.path.join(folder, "ours-*.json"))):
        with open(path) as f:
            text = f.read()
        if not text.strip():
            continue
        report = json.loads(text)
        for row in report["rows"]:
            if row["what"] == "decode" and row["tokens_per_s"]:
                how = f"specontext, budget {report['budget']}, {report['selection']}"
                yield how, row["sequences"], row["depth"], row["tokens_per_s"]


def baselines(folder):
    with open(os.path.join(folder, "baselines.jsonl")) as f:
        for line in map(json.loads, f):
            yield "transformers, " + line["attention"], line["batch"], line["depth"], line.get("tokens_per_s")


def main(folder):
    theirs = list(baselines(folder))
    best = {}
    for _, batch, depth, rate in theirs:
        best[batch, depth] = max(rate or 0, best.get((batch, depth), 0))
    print("| what | sequences | depth | tokens/s | ms a step | ratio |\n|---|---|---|---|---|---|")
    for how, batch, depth, rate in sorted([*theirs, *ours(folder)], key=lambda r: (r[2], r[1], r[0])):
        if rate is None:
            print(f"| {how} | {batch} | {depth} | out of memory | - | - |")
            continue
        than = best.get((batch, depth))
        ratio = f"{rate / than:.2f}" if than else "-"
        print(f"| {how} | {batch} | {depth} | {rate:.1f} | {1e3 * batch / rate:.2f} | {ratio} |")


if __name__ == "__main__":
    main(sys.argv[1])
