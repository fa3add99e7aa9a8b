#!/usr/bin/env python3
"""Decoding with transformers on one GPU: what a user would otherwise run.

Usage: hf_decode.py -m FOLDER [--attention eager,sdpa] [--batch 1,4] [--depth 16384] [--generate 32] [--ids FILE]

Prints one JSON line a setting: milliseconds of a decode step (median and least of --generate steps after 3 that
warm up, each timed by itself with the device idle before and after), tokens/s of the whole batch, seconds of the
prefill, peak memory in bytes as PyTorch allocated it; or "out_of_memory". Prompts: --ids, token ids in decimal (as
`specontext tokenize --ids` prints them), repeated as needed, each sequence from another place on; otherwise random
ids. The prefill goes by pieces of --chunk tokens, because eager attention holds whole score matrices. Not called
transformers.py: that would hide the package from itself.
"""
import argparse
import json
import statistics
import sys
import time

import torch
import transformers


def options():
    a = argparse.ArgumentParser(description="Decoding with transformers on one GPU.")
    numbers = lambda text: [int(n) for n in text.split(",")]
    a.add_argument("-m", "--model", required=True)
    a.add_argument("--attention", default="eager,sdpa", type=lambda text: text.split(","))
    a.add_argument("--batch", default=[4], type=numbers)
    a.add_argument("--depth", default=[16384], type=numbers, help="tokens in the cache when decoding begins")
    a.add_argument("--generate", type=int, default=32, help="timed steps")
    a.add_argument("--chunk", type=int, default=512)
    a.add_argument("--ids", help="a file of token ids")
    a.add_argument("--device", default="cuda:0")
    a.add_argument("--dtype", default="bfloat16")
    return a.parse_args()


class Gpu:
    """Waits and counts, or, on a CPU, does neither."""

    def __init__(self, device):
        self.cuda = device.startswith("cuda")

    def wait(self):
        if self.cuda:
            torch.cuda.synchronize()

    def reset(self):
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak(self):
        return torch.cuda.max_memory_allocated() if self.cuda else None


def prompts(o, batch, depth, vocab):
    if not o.ids:
        return torch.randint(vocab, (batch, depth), generator=torch.Generator().manual_seed(1)).to(o.device)
    with open(o.ids) as f:
        ids = torch.tensor([int(n) for n in f.read().split()])
    at = torch.arange(depth) + torch.arange(batch)[:, None] * (len(ids) // max(batch, 1) + 1)
    return ids[at % len(ids)].to(o.device)


@torch.inference_mode()
def measure(o, gpu, model, batch, depth):
    ids = prompts(o, batch, depth, model.config.vocab_size)
    cache, times = transformers.DynamicCache(), []
    gpu.wait()
    begin = time.monotonic()
    for at in range(0, depth, o.chunk):
        logits = model(ids[:, at:at + o.chunk], past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    token = logits[:, -1].argmax(-1, keepdim=True)
    gpu.wait()
    prefill = time.monotonic() - begin
    for _ in range(o.generate + 3):
        begin = time.monotonic()
        logits = model(token, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        token = logits[:, -1].argmax(-1, keepdim=True)
        gpu.wait()
        times.append(1e3 * (time.monotonic() - begin))
    step = statistics.median(times[3:])
    return {"ms_per_step": step, "ms_least": min(times[3:]), "tokens_per_s": 1e3 * batch / step,
            "prefill_s": prefill, "peak_bytes": gpu.peak()}


def main():
    o = options()
    gpu = Gpu(o.device)
    for attention in o.attention:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            o.model, dtype=getattr(torch, o.dtype), attn_implementation=attention).to(o.device).eval()
        for depth in o.depth:
            for batch in o.batch:
                gpu.reset()
                line = {"engine": "transformers " + transformers.__version__, "attention": attention, "batch": batch,
                        "depth": depth}
                try:
                    line |= measure(o, gpu, model, batch, depth)
                except torch.OutOfMemoryError:
                    line["out_of_memory"] = True
                print(json.dumps(line), flush=True)
        del model
        gpu.reset()


if __name__ == "__main__":
    sys.exit(main())
