#!/usr/bin/env python3
"""Speed of llama.cpp on this machine: prefill and decode at several depths, as a table and as JSON.

    llama_cpp.py MODEL.gguf [--threads 2] [--flash off,on] [--json FILE]

Needs PyPI llama-cpp-python, whose name this file shares: it is a program, not a module to import.

What is timed: llama_decode alone. Sampling, tokenizing and loading are left out. Prefill asks for the
logits of its last token, decode for those of each token. Depth is the number of tokens already in the
cache when the first timed token is decoded; after each repeat the cache is cut back to that depth. The
token ids are a fixed pseudo-random sequence: the time of a dense model does not depend on them.

Medians over the repeats are given with the fastest and the slowest. Two threads that wait for each other
at every operator lose far more than their share when another process takes a core, so a repeat during
which others used more than 5 % of the processor does not count while there are tries left (--tries). The
column "clean" says how many of the repeats counted were undisturbed; at 0, the row is worth nothing.
"""
import argparse
import ctypes
import json
import os
import pathlib
import platform
import statistics
import sys
import time

# The folder of this file comes first in the path, where this file would hide the package of its name.
HERE = pathlib.Path(__file__).resolve().parent
sys.path[:] = [p for p in sys.path if pathlib.Path(p).resolve() != HERE]
import llama_cpp as lib  # noqa: E402


class Runner:
    """One model and context. Owns both; one thread."""

    def __init__(self, model, args, flash):
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = args.ctx, args.batch, args.batch, 1
        params.n_threads = params.n_threads_batch = args.threads
        params.type_k = params.type_v = {"f32": 0, "f16": 1}[args.kv]
        params.flash_attn_type = int(flash)
        self.ctx = lib.llama_init_from_model(model, params)
        if not self.ctx:
            raise SystemExit("llama.cpp: no context")
        self.memory = lib.llama_get_memory(self.ctx)
        self.room = args.batch
        self.batch = lib.llama_batch_init(self.room, 0, 1)
        self.n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        self.depth = 0

    def close(self):
        lib.llama_batch_free(self.batch)
        lib.llama_free(self.ctx)

    def token(self, position):
        return (position * 2654435761 >> 8) % (self.n_vocab - 1000) + 500

    def cut(self, depth):
        if not lib.llama_memory_seq_rm(self.memory, 0, depth, -1):
            raise SystemExit(f"llama.cpp: the cache cannot be cut to {depth} tokens")
        self.depth = depth

    def feed(self, count, at_once):
        """Seconds for `count` tokens after those in the cache, `at_once` in each call."""
        end = self.depth + count
        start = time.perf_counter()
        while self.depth < end:
            n = min(at_once, self.room, end - self.depth)
            self.batch.n_tokens = n
            for i in range(n):
                at = self.depth + i
                self.batch.token[i], self.batch.pos[i], self.batch.n_seq_id[i] = self.token(at), at, 1
                self.batch.seq_id[i][0], self.batch.logits[i] = 0, at + 1 == end or at_once == 1
            status = lib.llama_decode(self.ctx, self.batch)
            if status:
                raise SystemExit(f"llama_decode at depth {self.depth}: status {status}")
            self.depth += n
        lib.llama_synchronize(self.ctx)
        return time.perf_counter() - start


class Others:
    """Share of the processor that other processes used since the object was made."""

    def __init__(self):
        self.before = self.read()

    @staticmethod
    def read():
        line = pathlib.Path("/proc/stat").read_text().split("\n", 1)[0]
        ticks = [int(t) for t in line.split()[1:9]]  # user nice system idle iowait irq softirq steal
        own = os.times()
        busy = sum(ticks) - ticks[3] - ticks[4]
        return sum(ticks), busy, (own.user + own.system) * os.sysconf("SC_CLK_TCK")

    def share(self):
        total, busy, own = (a - b for a, b in zip(self.read(), self.before))
        return max(busy - own, 0) / max(total, 1)


def repeat(args, timed, undo):
    """Seconds of `args.repeats` repeats, undisturbed ones if there are any, and how many of them are."""
    clean, other = [], []
    while len(clean) < args.repeats and len(clean) + len(other) < max(args.tries, args.repeats):
        others = Others()
        seconds = timed()
        (clean if others.share() < 0.05 else other).append(seconds)
        undo()
    other.sort()
    return clean or other[:args.repeats], len(clean)


def rates(name, depth, tokens, measured, flash):
    seconds, clean = measured
    speed = sorted(tokens / s for s in seconds)
    median = statistics.median(speed)
    return {"what": name, "depth": depth, "flash": flash, "tokens": tokens, "repeats": len(speed),
            "clean": clean, "tokens_per_s": round(median, 2), "min": round(speed[0], 2),
            "max": round(speed[-1], 2), "ms_per_token": round(1000 / median, 3)}


def measure(model, args, flash):
    """Yields each row as soon as it is measured, so that a run cut short still shows what it has."""
    run = Runner(model, args, flash)
    run.feed(64, run.room)  # pages of the weights come in, the threads start
    run.cut(0)
    measured = repeat(args, lambda: run.feed(args.prefill, run.room), lambda: run.cut(0))
    yield rates("prefill", 0, args.prefill, measured, flash)
    for depth in args.depths:
        run.cut(min(run.depth, depth))
        if depth > run.depth:
            run.feed(depth - run.depth, run.room)
        measured = repeat(args, lambda: run.feed(args.decode, 1), lambda at=depth: run.cut(at))
        yield rates("decode", depth, args.decode, measured, flash)
    run.close()


def processor():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def main():
    args = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    args.add_argument("model")
    args.add_argument("--threads", type=int, default=2)
    args.add_argument("--ctx", type=int, default=8192)
    args.add_argument("--batch", type=int, default=512)
    args.add_argument("--kv", choices=("f16", "f32"), default="f16")
    args.add_argument("--flash", default="off,on", help="off, on, or both: off,on")
    args.add_argument("--prefill", type=int, default=2000, help="tokens")
    args.add_argument("--decode", type=int, default=64, help="tokens at each depth")
    args.add_argument("--depths", type=lambda s: [int(d) for d in s.split(",")], default=[0, 512, 4000, 7000])
    args.add_argument("--repeats", type=int, default=3)
    args.add_argument("--tries", type=int, default=12, help="at most, to get undisturbed repeats")
    args.add_argument("--json", help="file; - writes JSON instead of the table")
    args = args.parse_args()
    if max([args.prefill] + [d + args.decode for d in args.depths]) > args.ctx:
        raise SystemExit(f"--ctx {args.ctx}: too small for the depths asked for")

    quiet = lib.llama_log_callback(lambda level, text, user: None)
    lib.llama_log_set(quiet, ctypes.c_void_p(0))
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(args.model.encode(), lib.llama_model_default_params())
    if not model:
        raise SystemExit(f"{args.model}: llama.cpp does not load it")
    load = os.getloadavg()[0]
    report = {"engine": "llama.cpp", "llama_cpp_python": lib.__version__,
              "model": pathlib.Path(args.model).name, "processor": processor(), "cores": os.cpu_count(),
              "load_before": round(load, 2), "threads": args.threads, "batch": args.batch, "kv": args.kv,
              "features": lib.llama_print_system_info().decode().strip(), "rows": []}
    table = args.json != "-"
    if table:
        print(f"llama.cpp (llama-cpp-python {lib.__version__}), {report['model']}, {report['processor']}, "
              f"{args.threads} threads, KV {args.kv}, batch {args.batch}, load before {load:.2f}")
        print("| what | depth | flash | tokens/s | min | max | ms/token | clean |")
        print("|---|---|---|---|---|---|---|---|", flush=True)
    for flash in args.flash.split(","):
        for r in measure(model, args, {"off": False, "on": True}[flash]):
            report["rows"].append(r)
            if table:
                print(f"| {r['what']} {r['tokens']} | {r['depth']} | {flash} | {r['tokens_per_s']:.1f} | "
                      f"{r['min']:.1f} | {r['max']:.1f} | {r['ms_per_token']:.3f} | "
                      f"{r['clean']} of {r['repeats']} |", flush=True)
    lib.llama_model_free(model)
    text = json.dumps(report, indent=1) + "\n"
    if not table:
        print(text, end="")
    elif args.json:
        pathlib.Path(args.json).write_text(text)


if __name__ == "__main__":
    main()
