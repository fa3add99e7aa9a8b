#!/usr/bin/env python3
"""Memory of a card: what `specontext plan` says, what each process counts, what the card reports (NVML, sampled while
`specontext bench` runs), and whether all of them stayed within --gpu-memory.

    gpu_memory.py BIN_FOLDER MODEL HEAD [--gpu-memory 4G] [--retriever-device cpu] [--requests 1] [--depth 4096]
                  [--budget 1024] [--generate 32] [--device cuda:0] [--mps] [-- OPTION OF `specontext bench`...]

Wanted: each process within 3 % of the plan, and the card's own figure for all of them at most CAP. Exit code 1: not so,
or bench failed; 77: no NVML here, so the card's figures are missing."""
import argparse
import json
import os
import signal
import subprocess
import sys

import card

PARTS = ("kvstore", "retriever", "decoder")
SHARE = 0.03
MIB = card.MIB


def options():
    a = argparse.ArgumentParser(description="Plan, counts and card.")
    a.add_argument("bin")
    a.add_argument("model")
    a.add_argument("head")
    a.add_argument("--gpu-memory", default="4G")
    a.add_argument("--device", default="cuda:0")
    a.add_argument("--retriever-device")
    a.add_argument("--requests", default="1")
    a.add_argument("--depth", default="4096")
    a.add_argument("--budget", default="1024")
    a.add_argument("--generate", default="32")
    a.add_argument("--selection", default="previous")
    a.add_argument("--seconds", type=float, default=240, help="of the run, at most")
    a.add_argument("--mps", action="store_true")
    own = sys.argv[1:]
    split = own.index("--") if "--" in own else len(own)
    o = a.parse_args(own[:split])
    o.more = own[split + 1:]
    o.retriever_device = o.retriever_device or o.device
    return o


def output(command, env, seconds):
    """Standard output of a command. It is interrupted first when its time is over, so that it ends its parts."""
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as p:
        try:
            out, err = p.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            p.send_signal(signal.SIGINT)
            try:
                out, err = p.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                p.kill()
                out, err = p.communicate()
            sys.exit(f"{' '.join(command[:2])}: no end in {seconds:g} s\n{err[-500:]}")
    if p.returncode:
        sys.exit(f"{' '.join(command[:2])}: exit code {p.returncode}: {err.strip()[-1000:]}")
    return out


def bench_command(o):
    return [os.path.join(o.bin, "specontext"), "bench", "-m", o.model, "-H", o.head, "--device", o.device,
            "--retriever-device", o.retriever_device, "--gpu-memory", o.gpu_memory, "--requests", o.requests, "--prompt", "0",
            "--depth", o.depth, "--budget", o.budget, "--generate", o.generate, "--repeats", "1", "--selection", o.selection,
            "--json", *o.more]


def plan_command(o, context):
    return [os.path.join(o.bin, "specontext"), "plan", "-m", o.model, "-H", o.head, "--device", o.device,
            "--retriever-device", o.retriever_device, "--gpu-memory", o.gpu_memory, "--requests", o.requests, "--context",
            str(context), "--budget", o.budget, "--json"]


def mib(value):
    return "-" if value is None else f"{value / MIB:.0f}"


def percent(plan, measured):
    return "-" if measured is None or not measured else f"{100 * (plan - measured) / measured:+.1f}"


def table(o, plan, row, watch):
    """Prints it; the processes that are farther than SHARE from the plan."""
    off = []
    print("| MiB | plan | itself | card | plan against itself % | against the card % |\n|---|---|---|---|---|---|")
    for part in PARTS:
        planned = plan["gpu"][f"{part}_process_bytes"]
        own = (row["gpu_memory"] or {}).get(part, {}).get("total_bytes")
        seen = watch and watch.by_name.get(f"specontext-{part}"[:15])
        if not planned and not own:
            continue
        if seen and abs(planned - seen) > SHARE * seen:
            off.append(part)
        print(f"| {part} | {mib(planned)} | {mib(own)} | {mib(seen)} | {percent(planned, own)} | {percent(planned, seen)} |")
        for key, value in sorted(((row["gpu_memory"] or {}).get(part) or {}).items()):
            if key.endswith("_bytes") and key not in ("total_bytes", "host_registered_bytes"):
                print(f"|   {part}: {key[:-6]} | | {mib(value)} | | | |")
    terms = ", ".join(f"{k[:-6]} {mib(v)}" for k, v in plan["gpu"].items() if not k.endswith("process_bytes"))
    print(f"plan's terms: {terms}")
    return off


def main():
    o = options()
    card.end_on_sigterm()
    device = card.open_card(o.device)
    if o.mps:
        with card.Mps() as mps:
            return measure(o, device, mps.env)
    return measure(o, device, dict(os.environ))


def measure(o, device, env):
    watch = device and card.Watch(device)
    if watch:
        with watch:
            report = json.loads(output(bench_command(o), env, o.seconds))
    else:
        report = json.loads(output(bench_command(o), env, o.seconds))
    plan = json.loads(output(plan_command(o, report["context"]), env, 60))
    row = next(r for r in report["rows"] if r["what"] == "decode")
    cap = plan["gpu"]["cap_bytes"]
    print(f"{report['model']}, {o.requests} requests at {o.depth}, context {report['context']}, budget {o.budget}, "
          f"{row['layers_offloaded']} layers offloaded, {row['tokens_per_s']:.1f} tokens/s, retriever on "
          f"{o.retriever_device}{', MPS' if o.mps else ''}")
    off = table(o, plan, row, watch)
    counted = row["gpu_memory"]["total_bytes"]
    print(f"all: cap {mib(cap)}, counted {mib(counted)}, the card's most {mib(watch and watch.most)} MiB"
          + (f" in {watch.samples} samples, before {mib(watch.before)}" if watch else ""))
    if not watch:
        print("no NVML here: the card's figures are missing")
        return 77 if counted <= cap else 1
    if not watch.by_name:
        print("this driver does not tell memory by process; the sum is compared")
        planned = sum(plan["gpu"][f"{part}_process_bytes"] for part in PARTS)
        off = ["the sum"] if abs(planned - watch.most) > SHARE * watch.most else []
    over = watch.most > cap
    print(f"plan within {100 * SHARE:.0f} %: {'no: ' + ', '.join(off) if off else 'yes'}; within the cap: "
          f"{'no' if over else 'yes'}: {'FAILED' if off or over else 'ok'}")
    return 1 if off or over else 0


if __name__ == "__main__":
    sys.exit(main())
