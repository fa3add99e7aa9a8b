#!/usr/bin/env python3
"""The same tokens on a GPU wherever things lie: layers on the card, partly and wholly in host memory; the parts taking
turns on the card and under MPS; the retriever on the card, on a second one and on the CPU.

    gpu_equal.py BIN_FOLDER MODEL TEXT [--head HEAD] [--budget 256] [--tokens 64] [--layers 0,14,256]
                 [--selections current,previous,mixed] [--context 8192] [--device cuda:0] [--second cuda:1] [--json FILE]

One greedy `specontext run` each; a table says which wrote other tokens than the first of its selection, and from which
token on. The retriever on the CPU rounds otherwise, so it is told, not demanded. What the machine lacks (MPS, the second
card) is left out, and said. Exit code 1: some differ, or a run failed."""
import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

import card


def options():
    a = argparse.ArgumentParser(description="The same tokens wherever things lie.")
    a.add_argument("bin")
    a.add_argument("model")
    a.add_argument("text")
    a.add_argument("--head")
    a.add_argument("--budget", default="256")
    a.add_argument("--tokens", default="64")
    a.add_argument("--context", default="8192")
    a.add_argument("--layers", default="0,14,256", type=lambda text: text.split(","))
    a.add_argument("--selections", default="current,previous,mixed", type=lambda text: text.split(","))
    a.add_argument("--device", default="cuda:0")
    a.add_argument("--second", default="cuda:1")
    a.add_argument("--seconds", type=float, default=60, help="of one run, at most")
    a.add_argument("--json", help="all tokens")
    return a.parse_args()


def run(o, env, selection, layers, retriever):
    """The report of one run, or the last line of its error."""
    with tempfile.TemporaryDirectory() as folder:
        report = os.path.join(folder, "report.json")
        command = [os.path.join(o.bin, "specontext"), "run", "-m", o.model, "-f", o.text, "-n", o.tokens, "-c", o.context,
                   "--ignore-eos", "--budget", o.budget, "--selection", selection, "--offload-layers", layers,
                   "--device", o.device, "--retriever-device", retriever, "--report", report]
        command += ["-H", o.head] if o.head else []
        command += ["--key-type", "int8"] if retriever == "cpu" else []  # as on a card
        try:
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=o.seconds)
        except subprocess.TimeoutExpired:
            return None, f"no end in {o.seconds:g} s"
        if done.returncode:
            return None, (done.stderr.strip().splitlines() or ["no word"])[-1]
        with open(report) as f:
            return json.load(f), None


def cases(o, second):
    """Processes, layers in host memory, the retriever's device, whether equality is demanded."""
    for processes in ["time-sliced"] + (["MPS"] if card.Mps.available() else []):
        for layers in o.layers:
            yield processes, layers, o.device, True
        if second:
            yield processes, o.layers[0], o.second, True
            yield processes, o.layers[-1], o.second, True
        yield processes, o.layers[0], "cpu", False


def second_card(o):
    """Whether there is one: a run of one token with the retriever there."""
    tokens, o.tokens = o.tokens, "1"
    _, error = run(o, None, "current", "0", o.second)
    o.tokens = tokens
    return error is None or "no such" not in error and "visible GPUs" not in error


def measure(o, rows, envs):
    first, failed = {}, 0
    print("| selection | processes | layers in host memory | retriever | tokens | s |\n|---|---|---|---|---|---|")
    for processes, layers, retriever, demanded in cases(o, envs["second"]):
        for selection in o.selections:
            begin = time.monotonic()
            report, error = run(o, envs.get(processes), selection, layers, retriever)
            if error:
                verdict, bad = error, True
            else:
                tokens = report["tokens"]
                base = first.setdefault(selection, tokens)
                same = next((i for i, (a, b) in enumerate(zip(base, tokens)) if a != b), min(len(base), len(tokens)))
                bad = tokens != base
                verdict = f"{len(tokens)} equal" if not bad else f"differ from token {same} on"
                layers = f"{report['layers_offloaded_max']}"
                rows.append(dict(selection=selection, processes=processes, layers=layers, retriever=retriever,
                                 tokens=tokens))
            failed += bad and (demanded or error is not None)
            print(f"| {selection} | {processes} | {layers} | {retriever} | {verdict}{'' if demanded else ' (not demanded)'}"
                  f" | {time.monotonic() - begin:.1f} |", flush=True)
    return failed


def main():
    o, rows = options(), []
    card.end_on_sigterm()
    envs = {"second": second_card(o)}
    if card.Mps.available():
        with card.Mps() as mps:
            envs["MPS"] = mps.env
            failed = measure(o, rows, envs)
    else:
        failed = measure(o, rows, envs)
        print("MPS: nvidia-cuda-mps-control is not here; left out")
    if not envs["second"]:
        print(f"{o.second}: not here; left out")
    print(f"{len(rows)} runs, {failed} failed or unequal: {'FAILED' if failed else 'ok'}")
    if o.json:
        with open(o.json, "w") as f:
            json.dump(rows, f)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
