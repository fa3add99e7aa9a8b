#!/usr/bin/env python3
"""Makes a large model that computes what a small one computes, to measure speed at the large one's cost with real
text and real attention.

Usage: inflate.py -m MODEL -o FOLDER [--shape llama-3.1-8b | llama-3.2-1b] [--layers N --hidden N --q-heads N
                  --kv-heads N --head-dim N --ffn N --vocab N] [--dtype bfloat16 | float32] [--seed N]
                  [--head HEAD --head-out FILE --specontext PROGRAM]

MODEL is a GGUF file or a Hugging Face folder of a Llama without rope scaling. FOLDER gets config.json, sharded
safetensors and, from a GGUF file, the tokenizer; its logits are the small model's, to the accuracy of the type, when
no layers are dropped and the output matrix is not tied to the embedding (a tied one can take the last norm's weights
only on average). transform.py says how. HEAD is the small model's retrieval head; its large form names the
fingerprints that `PROGRAM inspect -m FOLDER --json` gives. numpy alone; one thread a core.

tests/vectors/inflated, checked by tests/unit/test_arch.c:
    tools/reference_model.py folder llama-gqa SMALL
    tools/inflate/inflate.py -m SMALL -o tests/vectors/inflated --layers 3 --hidden 84 --q-heads 6 --kv-heads 3 \
        --head-dim 32 --ffn 160 --vocab 144 --context 256
"""
import argparse
import json
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np

import files
import retrieval
import tokenizer
from source import Source
from transform import Inflation

SHAPES = {
    "llama-3.1-8b": dict(layers=32, hidden=4096, q_heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=128256,
                         tied=False),
    "llama-3.2-1b": dict(layers=16, hidden=2048, q_heads=32, kv_heads=8, head_dim=64, ffn=8192, vocab=128256,
                         tied=True),
}


def options():
    a = argparse.ArgumentParser(description="Makes a large model that computes what a small one computes.")
    a.add_argument("-m", "--model", required=True)
    a.add_argument("-o", "--output", required=True)
    a.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    for name in SHAPES["llama-3.1-8b"]:
        if name != "tied":
            a.add_argument("--" + name.replace("_", "-"), type=int)
    a.add_argument("--tied", type=int, choices=(0, 1))
    a.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    a.add_argument("--context", type=int, default=131072, help="positions that config.json and the head allow")
    a.add_argument("--seed", type=int, default=1)
    a.add_argument("--threads", type=int, default=min(os.cpu_count() or 1, 16))
    a.add_argument("--head", help="the small model's retrieval head")
    a.add_argument("--head-out")
    a.add_argument("--specontext", default="specontext")
    o = a.parse_args()
    o.shape = SimpleNamespace(**{k: v if getattr(o, k) is None else getattr(o, k) for k, v in SHAPES[o.shape].items()})
    if bool(o.head) != bool(o.head_out):
        a.error("--head and --head-out go together")
    return o


class Shards:
    """The files of the folder: embedding and last norm, output matrix unless tied, and one for each layer."""

    def __init__(self, inflation, o):
        self.inflation, self.folder, self.tied = inflation, o.output, bool(o.shape.tied)
        self.makers = [self.embedding] if self.tied else [self.embedding, self.output]
        self.makers += [lambda i=i: self.layer(i) for i in range(o.shape.layers)]
        self.matrix = "BF16" if o.dtype == "bfloat16" else "F32"
        self.map = {}

    def name(self, number):
        return f"model-{number + 1:05d}-of-{len(self.makers):05d}.safetensors"

    def embedding(self):
        t = self.inflation.t
        shapes = {"model.embed_tokens.weight": (t.vocab, t.hidden), "model.norm.weight": (t.hidden,)}

        def blocks():
            yield from (("model.embed_tokens.weight", rows) for rows in self.inflation.embedding())
            yield "model.norm.weight", self.inflation.output_norm(self.tied)

        return shapes, blocks()

    def output(self):
        t = self.inflation.t
        return {"lm_head.weight": (t.vocab, t.hidden)}, (("lm_head.weight", w) for w in self.inflation.output())

    def layer(self, number):
        name = lambda part: f"model.layers.{number}.{part}.weight"
        shapes = {name(part): shape for part, shape in self.inflation.layer_shapes().items()}
        return shapes, ((name(part), w) for part, w in self.inflation.layer(number))

    def write(self, number):
        shapes, blocks = self.makers[number]()
        self.map |= {name: self.name(number) for name in shapes}
        return files.write(os.path.join(self.folder, self.name(number)), shapes, blocks, lambda name: self.matrix)

    def run(self, threads):
        with ThreadPoolExecutor(threads) as pool:
            total = sum(pool.map(self.write, range(len(self.makers))))
        tokenizer.write_json(self.folder, "model.safetensors.index.json",
                             {"metadata": {"total_size": total}, "weight_map": dict(sorted(self.map.items()))})
        return total


def write_config(o, s, ends):
    t = o.shape
    tokenizer.write_json(o.output, "config.json", {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": t.hidden,
        "intermediate_size": t.ffn, "num_hidden_layers": t.layers, "num_attention_heads": t.q_heads,
        "num_key_value_heads": t.kv_heads, "head_dim": t.head_dim, "vocab_size": t.vocab,
        "max_position_embeddings": o.context, "rms_norm_eps": float(f"{s.config['rms_norm_eps']:.6g}"),
        "rope_theta": s.config["rope_theta"], "rope_scaling": None, "tie_word_embeddings": bool(t.tied),
        "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "torch_dtype": o.dtype, "use_cache": True,
        **ends})


def main():
    o = options()
    begin = time.monotonic()
    os.makedirs(o.output, exist_ok=True)
    s = Source(o.model)
    inflation = Inflation(s, o.shape, o.seed)
    ends = tokenizer.write(s.gguf, o.output) if s.gguf else {}
    write_config(o, s, ends)
    total = Shards(inflation, o).run(o.threads)
    print(f"{o.output}: {total} bytes of weights, {time.monotonic() - begin:.1f} s", flush=True)
    if o.head:
        report = json.loads(subprocess.run([o.specontext, "inspect", "-m", o.output, "--json"], check=True,
                                           capture_output=True).stdout)
        retrieval.inflate(inflation, o.head, o.head_out, (report["fingerprint"], report["tokenizer_fingerprint"]),
                          o.context)
        print(o.head_out)


if __name__ == "__main__":
    main()
