#!/usr/bin/env python3
"""The table of bench/gpu.sh: gpu_table.py FOLDER. Ratios are to transformers' fastest attention at the same batch
and depth, above 1 in our favour; the floor is reading weights and attended KV once at the rate of a copy."""
import glob
import json
import os
import sys

MIB = 1 << 20


def reports(folder):
    for path in sorted(glob.glob(os.path.join(folder, "ours-*.json"))):
        with open(path) as f:
            text = f.read()
        if text.strip():
            yield os.path.basename(path)[:-len(".json")].rsplit("-", 1)[1], json.loads(text)


def ours(folder):
    for variant, report in reports(folder):
        how = f"specontext {variant}"
        if report["attention"] == "sparse":
            how += f", budget {report['budget']}, {report['selection']}"
        for row in report["rows"]:
            if row["what"] == "decode" and row["tokens_per_s"]:
                yield how, row["sequences"], row["depth"], row["tokens_per_s"], row


def baselines(folder):
    with open(os.path.join(folder, "baselines.jsonl")) as f:
        for line in map(json.loads, f):
            yield "transformers, " + line["attention"], line["batch"], line["depth"], line.get("tokens_per_s"), None


def figures(row):
    """What only our rows have: floor, offloaded layers, MB a step, waits for tables, memory."""
    if row is None:
        return ["-"] * 6
    memory = row["gpu_memory"]
    texts = [("{:.2f}", row["step_to_floor"]), ("{}", row["layers_offloaded"]),
             ("{:.2f}", row["loaded_bytes_per_step"] and row["loaded_bytes_per_step"] / 1e6),
             ("{:.0%}", row["link_share"]), ("{:.0f}", row["wait_us"]["tables"]["p99"]),
             ("{:.0f}", memory and memory["total_bytes"] / MIB)]
    return ["-" if value is None else text.format(value) for text, value in texts]


def main(folder):
    theirs = list(baselines(folder))
    best = {}
    for _, batch, depth, rate, _ in theirs:
        best[batch, depth] = max(rate or 0, best.get((batch, depth), 0))
    names = ["what", "sequences", "depth", "tokens/s", "ms a step", "ratio", "x floor", "layers offloaded",
             "MB loaded a step", "of the link", "tables p99 us", "GPU MiB"]
    print("| " + " | ".join(names) + " |\n|" + "---|" * len(names))
    for how, batch, depth, rate, row in sorted([*theirs, *ours(folder)], key=lambda r: (r[2], r[1], r[0])):
        if rate is None:
            cells = ["out of memory", "-", "-"]
        else:
            than = best.get((batch, depth))
            cells = [f"{rate:.1f}", f"{1e3 * batch / rate:.2f}", f"{rate / than:.2f}" if than else "-"]
        print("| " + " | ".join([how, str(batch), str(depth), *cells, *figures(row)]) + " |")


if __name__ == "__main__":
    main(sys.argv[1])
