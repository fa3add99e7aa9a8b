#!/usr/bin/env python3
"""What bench/gpu.sh measured, held against what is wanted: gpu_targets.py FOLDER. One line for each figure that a row
is asked for; rows that nothing is asked of are left out. Exit code 1: some figure misses its target."""
import json
import os
import statistics
import sys

import gpu_table

NEIGHBOURS = 16  # steps on each side of a threshold


def threshold(row, move):
    """The slowest step at a change of residency over the median of its neighbours. The step's number may be off by one:
    the parts' figures and the tokens come by different ways."""
    steps, at = row["steps_ms"][move["repeat"]], move["step"]
    around = range(max(at - 1, 0), min(at + 3, len(steps)))
    near = [steps[i] for i in range(max(at - NEIGHBOURS, 0), min(at + NEIGHBOURS, len(steps))) if i not in around]
    return max((steps[i] for i in around), default=0) / statistics.median(near) if near else None


def wanted(report, row):
    """(what, figure, limit, text of the figure)"""
    many, deep = row["sequences"] >= 32, row["depth"] >= 16384
    sparse, mps = report["attention"] == "sparse", report["gpu"]["mps"]
    link = report["gpu"]["link_bytes_per_s"]
    if not sparse:
        return
    if row["layers_offloaded"] == 0 and row["sequences"] == 1 and row["depth"] <= 2048:
        yield "step over floor, one request", row["step_to_floor"], 1.35, f"{row['step_ms']:.2f} ms"
    if row["layers_offloaded"] == 0 and many and deep:
        yield "step over floor, many", row["step_to_floor"], 1.5, f"{row['step_ms']:.2f} ms, floor {row['floor_ms']:.2f}"
    if row["layers_offloaded"] and report["elastic"]:
        load_ms = 1e3 * row["loaded_bytes_per_step"] / link
        least = max(row["floor_ms"], load_ms)
        step = statistics.median(ms for repeat in row["steps_ms"] for ms in repeat)
        yield ("step over the larger of floor and loads", row["step_ms"] / least, 1.3,
               f"{row['step_ms']:.2f} ms, median {step:.2f}, floor {row['floor_ms']:.2f}, loads {load_ms:.2f}")
    for move in row["moves"]:
        yield (f"step with which {move['layers_offloaded']} layers are offloaded over its neighbours",
               threshold(row, move), 1.5, f"repeat {move['repeat']}, step {move['step']}; {row['move_ms']:.1f} ms of the store for {len(row['moves'])}")
    tables, retriever = row["wait_us"]["tables"], sum(v or 0 for v in row["retriever"].values())
    if many and mps:
        steps = sum(len(repeat) for repeat in row["steps_ms"])
        text = f"p50 {tables['p50'] or 0:.0f}, p99 {tables['p99'] or 0:.0f} us, of {steps} steps"
        if report["selection"] == "previous":
            yield "wait for tables, p50 us", tables["p50"], 20, text
            yield "wait for tables, p99 us", tables["p99"], 100, text
        elif report["selection"] == "mixed":
            yield "wait for tables, p50 us", tables["p50"], 300, text
        else:
            yield "wait for tables, p50 us", tables["p50"], 1e3 * (retriever + 1), text
    if many and row["depth"] >= 32768:
        yield "retriever's step, ms", retriever, 1.5, f"{retriever:.2f} ms"


def main(folder):
    missed = 0
    print("| what | row | figure | wanted | measured | |\n|---|---|---|---|---|---|")

    def line(what, row, figure, limit, text, good):
        nonlocal missed
        missed += not good
        print(f"| {what} | {row} | {'-' if figure is None else f'{figure:.3f}'} | {limit} | {text} | {'ok' if good else 'missed'} |")

    eager = {depth: rate for how, batch, depth, rate, _ in gpu_table.baselines(folder)
             if how == "transformers, eager" and batch == 4}
    for variant, report in gpu_table.reports(folder):
        for row in report["rows"]:
            if row["what"] != "decode":
                continue
            name = (f"{variant}, {row['sequences']} x {row['depth']}, {report['selection'] or 'full'}, "
                    f"{'MPS' if report['gpu']['mps'] else 'time-sliced'}, {row['layers_offloaded']} offloaded")
            for what, figure, limit, text in wanted(report, row):
                line(what, name, figure, f"<= {limit:g}", text, figure is not None and figure <= limit)
            theirs = eager.get(row["depth"])
            if theirs and row["sequences"] == 32 and report["attention"] == "sparse":
                line("tokens/s over transformers' eager at batch 4", name, row["tokens_per_s"] / theirs, ">= 60",
                     f"{row['tokens_per_s']:.0f} / {theirs:.0f}", row["tokens_per_s"] >= 60 * theirs)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
