#!/usr/bin/env python3
"""Our daemons beside llama.cpp: the same GGUF, the same run, repeat by repeat in turn.

    compare.py BIN_FOLDER MODEL.gguf [--threads 2] [--repeats 5] [--json FILE]

Needs a Python with PyPI llama-cpp-python; `make bench LLAMA_PYTHON=/path/to/python` calls it. Ours is
`specontext bench --paced`, which waits for a line before each repeat; llama.cpp is driven by the Runner of
baselines/llama_cpp.py. While one works the other sleeps, so other work on the machine meets both alike.

Both take activations of 8 bits and keep K and V in 16. llama.cpp runs with and without flash attention, and
the faster of the two counts, row by row. Medians of tokens/s; beside them the processor time of a token (all
threads, of ours all four processes), which other work disturbs less: ratios are ours / llama.cpp for rates,
llama.cpp / ours for times, so above 1 is in our favour throughout. "others" is the share of the processor
that neither used while the row was measured; where it is large, the processor times are the ones to read.
Memory: proportional set sizes with everything loaded; of llama.cpp without what Python took before.
"""
import argparse
import importlib.util
import json
import os
import pathlib
import statistics
import subprocess
import time

HERE = pathlib.Path(__file__).resolve().parent
spec = importlib.util.spec_from_file_location("baseline", HERE / "baselines" / "llama_cpp.py")
baseline = importlib.util.module_from_spec(spec)
spec.loader.exec_module(baseline)
lib = baseline.lib


def pss():
    for line in pathlib.Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


class Ours:
    """One `specontext bench --paced`. Rows come in the order of its own plan."""

    def __init__(self, args, options):
        command = [str(pathlib.Path(args.bin) / "specontext"), "bench", "-m", args.model, "--paced",
                   "--activations", args.activations, "--cores", str(args.threads), "-r", str(args.repeats)]
        self.process = subprocess.Popen(command + options, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"specontext bench ended early, exit code {self.process.wait()}")
        return json.loads(line)

    def end(self):
        report = json.loads(self.process.stdout.readline())
        self.process.stdin.close()
        if self.process.wait():
            raise SystemExit(f"specontext bench: exit code {self.process.returncode}")
        return report


class Llama:
    """A context with flash attention and one without, over one model."""

    def __init__(self, model, args):
        self.runners = [baseline.Runner(model, args, flash) for flash in (False, True)]
        for run in self.runners:
            run.feed(64, run.room)
            run.cut(0)

    def deepen(self, depth):
        for run in self.runners:
            run.cut(min(run.depth, depth))
            if run.depth < depth:
                run.feed(depth - run.depth, run.room)

    def measure(self, which, what, tokens):
        """(tokens/s, processor ms a token); the depth is as before afterwards."""
        run = self.runners[which]
        depth, cpu = run.depth, time.process_time()
        seconds = run.feed(tokens, 1 if what == "decode" else run.room)
        cpu = time.process_time() - cpu
        run.cut(depth)
        return tokens / seconds, 1e3 * cpu / tokens


def compare(ours, llama, what, depth, tokens, repeats):
    llama.deepen(depth)
    ours.ask()  # builds the depth, warms up
    samples = {"ours": [], "off": [], "on": []}
    others = 0
    for _ in range(repeats):
        load = baseline.Others()
        samples["off"].append(llama.measure(0, what, tokens))
        samples["on"].append(llama.measure(1, what, tokens))
        others += load.share()
        answer = ours.ask()
        assert answer["what"] == what and answer["depth"] == depth, answer
        samples["ours"].append((answer["tokens_per_s"], answer["cpu_ms_per_token"]))
    mid = {k: tuple(statistics.median(column) for column in zip(*v)) for k, v in samples.items()}
    flash = max(("off", "on"), key=lambda k: mid[k][0])
    cpu = min(mid["off"][1], mid["on"][1])
    return {"what": what, "depth": depth, "tokens": tokens, "ours": mid["ours"][0], "llama": mid[flash][0],
            "flash": flash, "ratio": mid["ours"][0] / mid[flash][0], "ours_cpu_ms": mid["ours"][1],
            "llama_cpu_ms": cpu, "cpu_ratio": cpu / mid["ours"][1], "others": others / repeats, "samples": samples}


def print_table(report):
    print("| ours | what | depth | tokens/s | llama.cpp | flash | ratio | cpu ms/token | llama.cpp | ratio | others |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for r in report["rows"]:
        print(f"| {r['how']} | {r['what']} {r['tokens']} | {r['depth']} | {r['ours']:.1f} | {r['llama']:.1f} | "
              f"{r['flash']} | {r['ratio']:.2f} | {r['ours_cpu_ms']:.3f} | {r['llama_cpu_ms']:.3f} | "
              f"{r['cpu_ratio']:.2f} | {100 * r['others']:.0f} % |")
    for name, size in report["memory"].items():
        print(f"memory, {name}: {size / 2**20:.0f} MiB")


def main():
    args = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    args.add_argument("bin")
    args.add_argument("model")
    args.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args.add_argument("--repeats", type=int, default=5)
    args.add_argument("--prefill", type=int, default=2000)
    args.add_argument("--decode", type=int, default=32)
    args.add_argument("--depths", default="0,512,7000")
    args.add_argument("--budget", type=int, default=512)
    args.add_argument("--selection", default="previous")
    args.add_argument("--activations", choices=("q8", "f32"), default="q8")
    args.add_argument("--json", help="file for all samples")
    args = args.parse_args()
    depths = [int(d) for d in args.depths.split(",")]
    args.batch, args.kv = 512, "f16"
    args.ctx = -(-max(args.prefill, max(depths) + args.decode + 64) // 256) * 256
    base = pss()
    quiet = lib.llama_log_callback(lambda level, text, user: None)
    lib.llama_log_set(quiet, baseline.ctypes.c_void_p(0))
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(args.model.encode(), lib.llama_model_default_params())
    if not model:
        raise SystemExit(f"{args.model}: llama.cpp does not load it")
    rows, memory = [], {}
    llama = Llama(model, args)
    sparse = ["--selection", args.selection, "--budget", str(args.budget)]
    n, p = str(args.decode), str(args.prefill)
    plans = [("full attention", ["--attention", "full", "-p", p, "-n", n, "-d", "0"],
              [("prefill", 0, args.prefill), ("decode", 0, args.decode)]),
             (f"{args.selection}, budget {args.budget}", sparse + ["-p", "0", "-n", n, "-d", args.depths],
              [("decode", d, args.decode) for d in depths])]
    for how, options, wanted in plans:
        ours = Ours(args, options)
        for what, depth, tokens in wanted:
            rows.append({"how": how, **compare(ours, llama, what, depth, tokens, args.repeats)})
        memory[f"ours, {how}"] = ours.end()["rows"][-1]["pss_bytes"]
    memory[f"llama.cpp, two contexts of {args.ctx}"] = pss() - base
    llama.runners.pop().close()
    memory[f"llama.cpp, one context of {args.ctx}"] = pss() - base
    report = {"model": pathlib.Path(args.model).name, "processor": baseline.processor(), "threads": args.threads,
              "activations": args.activations, "llama_cpp_python": lib.__version__, "rows": rows, "memory": memory}
    print(f"{report['model']}, {report['processor']}, {args.threads} threads, activations {args.activations}, "
          f"llama-cpp-python {lib.__version__}")
    print_table(report)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
