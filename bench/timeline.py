#!/usr/bin/env python3
"""Where a step's time goes, from the stamps that the three processes took (base/trace.h).

    SPECONTEXT_TRACE=FOLDER specontext bench ...      # or run: an empty folder that exists
    bench/timeline.py FOLDER [--first N]

For each event of a sparse step: when it came after the step was posted - median, 90th and 99th percentile, largest -
over all steps that have it, without the first N (4) of each row of steps (steps that follow one another without a
dense one, and without a pause longer than --gap ms). Then the same of the parts.
With `previous` a selection is used by the step after.

Behind them what the store's planner did meanwhile, and why steps were late: of those that it found, or whose tables it
wrote, later than --late us (200) after they could be, in what it was at those times. A moment counts for the shortest
span around it; "asleep": it was not awake; "other": it was, with nothing that has a name; "near": it looked for a step
that is near, or was not let to.
"""
import argparse
import bisect
import glob
import os
import struct
import sys

EVENTS = ("posted told heard begun queued ranked compared answered sent topk topk_taken checked drafted seen "
          "tables_early tables_late written write_back consumed launched released_early released_late ended").split()
NAMES = {i + 1: name for i, name in enumerate(EVENTS)}
SPANS = ("awake advance sets open close command leave move return gather back register_late register_ahead touch grow "
         "stream_wait widen populate near").split()
SPAN = {i + 64: name for i, name in enumerate(SPANS)}
BESIDE = ("populate",)  # of other threads
PARTS = (("posted", "told"), ("told", "heard"), ("heard", "begun"), ("begun", "queued"), ("queued", "ranked"),
         ("ranked", "compared"), ("compared", "answered"), ("answered", "sent"), ("sent", "topk"),
         ("topk", "topk_taken"), ("topk_taken", "checked"), ("checked", "tables_late"), ("checked", "drafted"),
         ("begun", "sent"), ("posted", "seen"), ("seen", "tables_early"), ("seen", "tables_late"),
         ("tables_late", "released_late"), ("posted", "launched"), ("launched", "released_early"),
         ("launched", "released_late"), ("released_late", "ended"), ("written", "write_back"),
         ("write_back", "consumed"), ("ended", "written"))


def read(path):
    with open(path, "rb") as file:
        data = file.read(16)
        magic, count = struct.unpack("<8sQ", data)
        if magic != b"SPTRACE1":
            sys.exit(f"{path}: found {magic!r}, expected a trace")
        data = file.read(16 * min(count, 1 << 20))
    return [s for s in struct.iter_unpack("<qII", data) if s[0]]


def steps_of(stamps):
    """{step: {event: ns}}, the last stamp of each event."""
    steps = {}
    for ns, step, event in stamps:
        if event not in SPAN:
            steps.setdefault(step, {})[NAMES.get(event, str(event))] = ns
    return steps


class Spans:
    """What the planner did when: (begin, end, name), by begin."""

    def __init__(self, stamps):
        self.all = sorted((ns, ns + took, SPAN[event]) for ns, took, event in stamps if event in SPAN)
        self.planner = [s for s in self.all if s[2] not in BESIDE]
        self.begins = [s[0] for s in self.planner]
        self.longest = max((end - begin for begin, end, _ in self.planner), default=0)

    def causes(self, begin, end):
        """{name: ns} of that time."""
        first = bisect.bisect_left(self.begins, begin - self.longest)
        inside = [s for s in self.planner[first:bisect.bisect_left(self.begins, end)] if s[1] > begin]
        cuts = sorted({begin, end} | {t for b, e, _ in inside for t in (b, e) if begin < t < end})
        found = {}
        for a, b in zip(cuts, cuts[1:]):
            around = [(e - s, name) for s, e, name in inside if s <= a and e >= b]
            name = min(around)[1] if around else "asleep"
            name = "other" if name == "awake" else name
            found[name] = found.get(name, 0) + b - a
        return found


def quantile(values, q):
    return values[min(len(values) - 1, int(q * len(values)))] if values else float("nan")


def line(name, ns):
    us = sorted(v / 1000 for v in ns)
    return (f"{name:32} {len(us):6} {quantile(us, .5):10.1f} {quantile(us, .9):10.1f} {quantile(us, .99):10.1f} "
            f"{us[-1]:10.1f}")


def print_spans(spans, steps, used, late_us):
    if not spans.all:
        return
    print(f"\n{'the store meanwhile':32} {'times':>6} {'median':>10} {'p90':>10} {'p99':>10} {'most':>10}")
    for name in SPANS:
        ns = [end - begin for begin, end, found in spans.all if found == name]
        if ns:
            print(line(name + (" (beside)" if name in BESIDE else ""), ns))
    for a, b in (("posted", "seen"), ("seen", "tables_late"), ("written", "write_back")):
        late = [n for n in used if a in steps[n] and b in steps[n] and steps[n][b] - steps[n][a] > late_us * 1000]
        print(f"\n{a} -> {b}: {len(late)} of {len(used)} steps took more than {late_us:.0f} us")
        causes = {}
        for n in late:
            for name, ns in spans.causes(steps[n][a], steps[n][b]).items():
                causes.setdefault(name, []).append(ns)
        if causes:
            print(f"{'in':32} {'steps':>6} {'median':>10} {'p90':>10} {'p99':>10} {'most':>10} {'all ms':>10}")
        for name, ns in sorted(causes.items(), key=lambda c: -sum(c[1])):
            print(line(name, ns) + f" {sum(ns) / 1e6:10.1f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--first", type=int, default=4)
    parser.add_argument("--gap", type=float, default=200)
    parser.add_argument("--list", type=int, default=0, help="print so many steps of the last row, event by event")
    parser.add_argument("--worst", type=int, default=0, help="and so many of those that waited longest")
    parser.add_argument("--late", type=float, default=200)
    args = parser.parse_args()
    paths = sorted(glob.glob(os.path.join(args.folder, "*.trace")))
    if not paths:
        sys.exit(f"{args.folder}: no *.trace")
    stamps = [s for path in paths for s in read(path)]
    steps, spans = steps_of(stamps), Spans(stamps)
    sparse = [n for n in sorted(steps) if all(e in steps[n] for e in ("posted", "released_late", "tables_late"))]
    rows, last = [], None
    for n in sparse:
        if last is None or n != last + 1 or steps[n]["posted"] - steps[last]["posted"] > args.gap * 1e6:
            rows.append([])
        rows[-1].append(n)
        last = n
    rows = [row for row in rows if len(row) > args.first]
    used = [n for row in rows for n in row[args.first:]]
    print(f"{len(used)} steps of {len(rows)} rows, without the first {args.first} of each; us")
    print(f"{'after it was posted':32} {'steps':>6} {'median':>10} {'p90':>10} {'p99':>10} {'most':>10}")
    for event in EVENTS:
        ns = [steps[n][event] - steps[n]["posted"] for n in used if event in steps[n]]
        if ns:
            print(line(event, ns))
    print("\nparts")
    for a, b in PARTS:
        ns = [steps[n][b] - steps[n][a] for n in used if a in steps[n] and b in steps[n]]
        if ns:
            print(line(f"{a} -> {b}", ns))
    for a in ("ended", "posted"):
        ns = [steps[n]["posted"] - steps[n - 1][a] for row in rows for n in row[args.first:]
              if a in steps.get(n - 1, ())]
        if ns:
            print(line("step" if a == "posted" else f"{a} -> posted, the next", ns))
    print_spans(spans, steps, used, args.late)

    def waited(n):
        return steps[n]["released_late"] - steps[n].get("launched", steps[n]["posted"])

    for n in [n for row in rows[-1:] for n in row][:args.list] + sorted(used, key=waited)[len(used) - args.worst:]:
        at = sorted((ns - steps[n]["posted"], event) for event, ns in steps[n].items())
        print(f"step {n}: " + " ".join(f"{event} {ns / 1000:.0f}" for ns, event in at))
        causes = spans.causes(steps[n]["posted"], steps[n]["tables_late"])
        if spans.all:
            print("  posted -> tables_late: " + " ".join(f"{name} {ns / 1000:.0f}" for name, ns in causes.items()))


if __name__ == "__main__":
    main()
