#!/usr/bin/env python3
"""Reference logits of llama.cpp for the tests; how far llama.cpp is from itself and from exact arithmetic.

    golden_logits.py golden  MODEL.gguf TEXT --out FILE.bin [--full FILE.bin] [--kv f16|f32]
    golden_logits.py dequant MODEL.gguf --type F32|F16 --out OTHER.gguf [--only layers|embd]
    golden_logits.py noise   MODEL.gguf TEXT --work FOLDER [--json FILE]
    golden_logits.py show    FILE.bin [--full FILE.bin]

Needs the PyPI packages llama-cpp-python, gguf and numpy. tests/vectors/golden_smollm2_q4_1.md describes
the files byte by byte, gives the commands that made them, and the figures of `noise`.

`noise` also holds a forward pass of its own, in float64, which shares no code with llama.cpp: it says
which of llama.cpp's results is nearer to exact arithmetic on the stored weights, and, with llama.cpp's
roundings put in one after the other, where the rest of the difference comes from.
"""
import argparse
import ctypes
import json
import pathlib
import struct
import sys

import gguf
import numpy as np

POSITIONS = 1024
TOP_K = 64
FULL_ROWS = 64
N_CTX = 2048
HEADER = struct.Struct("<8sIIIIII")  # magic, version, positions (rows), top_k, vocabulary, reserved, reserved
MAGIC_TOP = b"SCTXGLD\0"
MAGIC_FULL = b"SCTXFUL\0"
VERSION = 1


# ---- llama.cpp ----

class Llama:
    """One model and one context of llama.cpp, with the logits of every position."""

    def __init__(self, path, *, n_batch=512, kv="f16", flash=False, threads=2):
        import llama_cpp as lib
        self.lib = lib
        self.log = lib.llama_log_callback(lambda level, text, user: None)
        lib.llama_log_set(self.log, ctypes.c_void_p(0))
        lib.llama_backend_init()
        self.model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
        if not self.model:
            raise SystemExit(f"{path}: llama.cpp does not load it")
        self.vocab = lib.llama_model_get_vocab(self.model)
        self.n_vocab = lib.llama_vocab_n_tokens(self.vocab)
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = N_CTX, n_batch, n_batch, 1
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = {"f32": 0, "f16": 1}[kv]
        params.flash_attn_type = int(flash)  # 0 disabled, 1 enabled; -1 would let llama.cpp choose
        self.ctx = lib.llama_init_from_model(self.model, params)
        if not self.ctx:
            raise SystemExit(f"{path}: no context")
        self.n_batch = n_batch

    def close(self):
        self.lib.llama_free(self.ctx)
        self.lib.llama_model_free(self.model)

    def tokenize(self, text):
        """No beginning-of-sequence token, and no text is taken for a control token."""
        room = len(text) + 8
        ids = (self.lib.llama_token * room)()
        n = self.lib.llama_tokenize(self.vocab, text, len(text), ids, room, False, False)
        if n < 0:
            raise SystemExit(f"text of {len(text)} bytes: {-n} tokens expected, room for {room}")
        return np.array(ids[:n], np.int32)

    def logits(self, ids):
        """float32 [len(ids)][n_vocab], teacher-forced from an empty cache."""
        out = np.empty((len(ids), self.n_vocab), np.float32)
        batch = self.lib.llama_batch_init(self.n_batch, 0, 1)
        for first in range(0, len(ids), self.n_batch):
            part = ids[first:first + self.n_batch]
            batch.n_tokens = len(part)
            for i, token in enumerate(part):
                batch.token[i], batch.pos[i] = int(token), first + i
                batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, 1
            status = self.lib.llama_decode(self.ctx, batch)
            if status:
                raise SystemExit(f"llama_decode at position {first}: status {status}")
            got = np.ctypeslib.as_array(self.lib.llama_get_logits(self.ctx), (len(part), self.n_vocab))
            out[first:first + len(part)] = got
        self.lib.llama_batch_free(batch)
        return out


def logits_of(path, ids, **options):
    llama = Llama(path, **options)
    out = llama.logits(ids)
    llama.close()
    return out


def tokens_of(path, text_path):
    llama = Llama(path)
    ids = llama.tokenize(pathlib.Path(text_path).read_bytes())
    llama.close()
    if len(ids) < POSITIONS + 1:
        raise SystemExit(f"{text_path}: expected at least {POSITIONS + 1} tokens, found {len(ids)}")
    return ids[:POSITIONS + 1]


# ---- distributions ----

def log_softmax(row):
    """(log-probabilities, log-sum-exp) of one row of logits, in float64."""
    row = row.astype(np.float64)
    top = row.max()
    lse = top + np.log(np.exp(row - top).sum())
    return row - lse, lse


def kl_exact(p_log, q_log):
    return float((np.exp(p_log) * (p_log - q_log)).sum())


def kl_lumped(ids, p_log_top, q_log):
    """KL over the top tokens and one bucket for all others; see the description of the file."""
    p_top = np.exp(p_log_top)
    rest = np.ones(len(q_log), bool)
    rest[ids] = False
    p_rest, q_rest = max(1.0 - p_top.sum(), 0.0), np.exp(q_log[rest]).sum()
    tail = p_rest * np.log(p_rest / q_rest) if p_rest > 0 else 0.0
    return float((p_top * (p_log_top - q_log[ids])).sum() + tail)


def top_of(row):
    """Ids of the TOP_K largest logits, falling; of equal logits the smaller id comes first."""
    return np.lexsort((np.arange(len(row)), -row))[:TOP_K]


def compare(ref, other, ids):
    """Figures of `other` against `ref`, both float32 [positions][n_vocab]."""
    kl, lumped, same, square, worst, losses, losses_ref = [], [], 0, 0.0, 0.0, [], []
    for p in range(len(ref)):
        p_log, _ = log_softmax(ref[p])
        q_log, _ = log_softmax(other[p])
        top = top_of(ref[p])
        kl.append(kl_exact(p_log, q_log))
        lumped.append(kl_lumped(top, p_log[top], q_log))
        same += int(ref[p].argmax() == other[p].argmax())
        gap = other[p].astype(np.float64) - ref[p]
        square += float((gap ** 2).mean())
        worst = max(worst, float(np.abs(gap).max()))
        losses.append(-q_log[ids[p + 1]])
        losses_ref.append(-p_log[ids[p + 1]])
    n = len(ref)
    return {
        "kl_mean": float(np.mean(kl)), "kl_median": float(np.median(kl)),
        "kl_p99": float(np.quantile(kl, 0.99)), "kl_max": float(np.max(kl)),
        "kl_lumped_mean": float(np.mean(lumped)), "top1_same": same / n, "top1_differ": n - same,
        "logit_rms": float(np.sqrt(square / n)), "logit_max": worst,
        "ppl": float(np.exp(np.mean(losses))), "ppl_ref": float(np.exp(np.mean(losses_ref))),
    }


# ---- files ----

def golden_write(args):
    ids = tokens_of(args.model, args.text)
    logits = logits_of(args.model, ids[:POSITIONS], kv=args.kv)
    n_vocab = logits.shape[1]
    lse = np.empty(POSITIONS, "<f8")
    top_ids = np.empty((POSITIONS, TOP_K), "<u4")
    for p in range(POSITIONS):
        lse[p] = log_softmax(logits[p])[1]
        top_ids[p] = top_of(logits[p])
    rows = np.arange(POSITIONS)
    with open(args.out, "wb") as out:
        out.write(HEADER.pack(MAGIC_TOP, VERSION, POSITIONS, TOP_K, n_vocab, 0, 0))
        out.write(lse.tobytes())
        out.write(ids.astype("<u4").tobytes())
        out.write(logits[rows, ids[1:]].astype("<f4").tobytes())
        out.write(top_ids.tobytes())
        out.write(np.take_along_axis(logits, top_ids.astype(np.int64), 1).astype("<f4").tobytes())
    if args.full:
        chosen = np.linspace(0, POSITIONS - 1, FULL_ROWS).round().astype("<u4")
        with open(args.full, "wb") as out:
            out.write(HEADER.pack(MAGIC_FULL, VERSION, FULL_ROWS, 0, n_vocab, 0, 0))
            out.write(chosen.tobytes())
            lost = []
            for p in chosen:
                exact = log_softmax(logits[p])[0]
                stored = exact.astype("<f2")
                out.write(stored.tobytes())
                lost.append(kl_exact(exact, log_softmax(stored)[0]))
        print(f"KL from the exact row to the stored one: mean {np.mean(lost):.1e}, max {max(lost):.1e}")
    for path in filter(None, (args.out, args.full)):
        print(f"{path}: {pathlib.Path(path).stat().st_size} bytes")


def golden_read(path):
    data = pathlib.Path(path).read_bytes()
    magic, version, n, k, n_vocab, *reserved = HEADER.unpack_from(data)
    size = HEADER.size + 8 * n + 4 * (n + 1) + 4 * n + 8 * n * k
    if magic != MAGIC_TOP or version != VERSION or any(reserved) or len(data) != size:
        raise SystemExit(f"{path}: magic {magic!r} version {version}, {len(data)} bytes, expected {size}")
    at = HEADER.size
    out = {"n_vocab": n_vocab}
    for name, kind, shape in (("lse", "<f8", (n,)), ("ids", "<u4", (n + 1,)), ("next", "<f4", (n,)),
                              ("top_ids", "<u4", (n, k)), ("top", "<f4", (n, k))):
        count = int(np.prod(shape))
        out[name] = np.frombuffer(data, kind, count, at).reshape(shape)
        at += count * int(kind[2])
    return out


def full_read(path):
    data = pathlib.Path(path).read_bytes()
    magic, version, n, _, n_vocab, *_ = HEADER.unpack_from(data)
    if magic != MAGIC_FULL or version != VERSION or len(data) != HEADER.size + 4 * n + 2 * n * n_vocab:
        raise SystemExit(f"{path}: magic {magic!r} version {version}, {len(data)} bytes")
    chosen = np.frombuffer(data, "<u4", n, HEADER.size)
    return chosen, np.frombuffer(data, "<f2", n * n_vocab, HEADER.size + 4 * n).reshape(n, n_vocab)


def golden_show(args):
    got = golden_read(args.file)
    n, k = got["top"].shape
    p_top = np.exp(got["top"] - got["lse"][:, None])
    rest = 1.0 - p_top.sum(1)
    print(f"positions {n}, top {k}, vocabulary {got['n_vocab']}")
    print(f"perplexity {np.exp(np.mean(got['lse'] - got['next'])):.6f}, next token is top-1 at "
          f"{np.mean(got['top_ids'][:, 0] == got['ids'][1:]):.4f} of the positions")
    print(f"mass outside the top {k}: mean {rest.mean():.6f}, median {np.median(rest):.6f}, "
          f"max {rest.max():.6f}")
    print(f"gap of the two largest logits: median {np.median(got['top'][:, 0] - got['top'][:, 1]):.4f}, "
          f"below 0.1 at {np.mean(got['top'][:, 0] - got['top'][:, 1] < 0.1):.4f} of the positions")
    if args.full:
        chosen, logs = full_read(args.full)
        total = np.exp(logs.astype(np.float64)).sum(1)
        top = np.take_along_axis(logs, got["top_ids"][chosen].astype(np.int64), 1)
        worst = np.abs(top - (got["top"][chosen] - got["lse"][chosen, None])).max()
        print(f"full rows {len(chosen)}: sum of probabilities {total.min():.6f}..{total.max():.6f}, "
              f"largest difference from the top-{k} file {worst:.6f}")


# ---- weights ----

def dequant(args):
    dequant_write(args.model, args.type, args.out, args.only)


def dequant_write(model, kind, out, only=None):
    """The same model with its quantized tensors written as F32 or F16; `only` limits it to one part."""
    reader = gguf.GGUFReader(model)
    arch = reader.fields["general.architecture"].contents()
    part_path = pathlib.Path(f"{out}.part")
    writer = gguf.GGUFWriter(part_path, arch)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        value = field.contents()
        if field.name == "general.file_type":
            value = {"F32": 0, "F16": 1}[kind]
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, value, field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        part = "embd" if tensor.name == "token_embd.weight" else "layers"
        if tensor.tensor_type == gguf.GGMLQuantizationType.F32 or only not in (None, part):
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        data = gguf.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, data.astype(np.float32 if kind == "F32" else np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part_path.rename(out)


# ---- a forward pass in float64 ----

def blocks_q8(x):
    """Activations rounded to 8 bits in blocks of 32, as Q8_0 and Q8_1 do it: (value, sum of each block)."""
    b = x.astype(np.float32).reshape(-1, x.shape[-1] // 32, 32)
    top = np.abs(b).max(2, keepdims=True)
    scale = top / np.float32(127)
    with np.errstate(divide="ignore"):
        inverse = np.where(top > 0, np.float32(127) / top, np.float32(0))
    q = np.rint(b * inverse)
    value = (scale.astype(np.float16).astype(np.float64) * q).reshape(x.shape)
    total = (scale[..., 0] * q.sum(2)).astype(np.float16).astype(np.float64)
    return value, total


class Exact:
    """Llama-type model of a GGUF in float64. Roundings of llama.cpp that can be put in:
    q8_layers, q8_output: activations before the matrices; f16_attn: operands of both attention products.
    jiggle: relative size of a random change of the norms' weights, which stands for another order of sums."""

    def __init__(self, path):
        self.reader = gguf.GGUFReader(path)
        self.tensors = {t.name: t for t in self.reader.tensors}
        self.heads = self.key("attention.head_count")
        self.heads_kv = self.key("attention.head_count_kv")
        self.eps = self.key("attention.layer_norm_rms_epsilon")
        self.base = self.key("rope.freq_base")
        self.jiggle = 0.0

    def key(self, name):
        return self.reader.fields["llama." + name].contents()

    def weight(self, name):
        t = self.tensors[name]
        return gguf.dequantize(t.data, t.tensor_type).astype(np.float64)

    def mul(self, name, x, rounding):
        t = self.tensors[name]
        w = self.weight(name)
        if not rounding:
            return x @ w.T
        value, total = blocks_q8(x)
        if t.tensor_type != gguf.GGMLQuantizationType.Q4_1:
            return value @ w.T
        # The block minimum is multiplied by the stored block sum, which is rounded on its own.
        blocks = t.data.reshape(w.shape[0], -1, 20)
        low = np.ascontiguousarray(blocks[..., 2:4]).view(np.float16)[..., 0].astype(np.float64)
        w -= np.repeat(low, 32, 1)
        return value @ w.T + total @ low.T

    def norm(self, name, x):
        w = self.weight(name)
        if self.jiggle:
            w *= 1 + self.jiggle * self.random.standard_normal(w.shape)
        return x / np.sqrt((x ** 2).mean(1, keepdims=True) + self.eps) * w

    def rope(self, x):
        """Pairs (2j, 2j+1): the converter to GGUF has permuted the rows of Q and K for it."""
        n, _, d = x.shape
        angle = np.arange(n)[:, None] * self.base ** (-np.arange(0, d, 2) / d)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        even, odd = x[..., 0::2], x[..., 1::2]
        return np.stack((even * cos - odd * sin, even * sin + odd * cos), -1).reshape(x.shape)

    def attention(self, q, k, v, f16):
        n, _, d = q.shape
        cut = (lambda a: a.astype(np.float32).astype(np.float16).astype(np.float64)) if f16 else (lambda a: a)
        mask = np.triu(np.full((n, n), -np.inf), 1)
        out = np.empty_like(q)
        for h in range(self.heads):
            g = h * self.heads_kv // self.heads
            score = cut(q[:, h]) @ cut(k[:, g]).T / np.sqrt(d) + mask
            p = np.exp(score - score.max(1, keepdims=True))
            out[:, h] = cut(p / p.sum(1, keepdims=True)) @ cut(v[:, g])
        return out.reshape(n, -1)

    def logits(self, ids, *, q8_layers=False, q8_output=False, f16_attn=False, jiggle=0.0):
        self.jiggle, self.random = jiggle, np.random.default_rng(1)
        x = self.weight("token_embd.weight")[ids]
        for i in range(self.key("block_count")):
            b = f"blk.{i}."
            h = self.norm(b + "attn_norm.weight", x)
            q, k, v = (self.mul(f"{b}attn_{n}.weight", h, q8_layers) for n in "qkv")
            q = self.rope(q.reshape(len(ids), self.heads, -1))
            k = self.rope(k.reshape(len(ids), self.heads_kv, -1))
            a = self.attention(q, k, v.reshape(len(ids), self.heads_kv, -1), f16_attn)
            x = x + self.mul(b + "attn_output.weight", a, q8_layers)
            h = self.norm(b + "ffn_norm.weight", x)
            gate, up = (self.mul(f"{b}ffn_{n}.weight", h, q8_layers) for n in ("gate", "up"))
            x = x + self.mul(b + "ffn_down.weight", gate / (1 + np.exp(-gate)) * up, q8_layers)
        x = self.norm("output_norm.weight", x)
        return self.mul("token_embd.weight", x, q8_output).astype(np.float32)


# ---- noise ----

def noise(args):
    work = pathlib.Path(args.work)
    work.mkdir(parents=True, exist_ok=True)
    ids = tokens_of(args.model, args.text)
    head = ids[:POSITIONS]
    other = {}
    for name, kind, only in (("f32", "F32", None), ("f16", "F16", None),
                             ("f32-layers", "F32", "layers"), ("f32-output", "F32", "embd")):
        other[name] = work / f"{name}.gguf"
        if not other[name].exists():
            dequant_write(args.model, kind, other[name], only)
    exact = Exact(args.model)
    q, q8 = args.model, {"q8_layers": True, "q8_output": True}
    runs = [
        ("q4_1, batch 512, KV f16 (golden)", lambda: logits_of(q, head)),
        ("q4_1, the same again", lambda: logits_of(q, head)),
        ("q4_1, one thread", lambda: logits_of(q, head, threads=1)),
        ("q4_1, batch 128", lambda: logits_of(q, head, n_batch=128)),
        ("q4_1, token by token", lambda: logits_of(q, head, n_batch=1)),
        ("q4_1, flash attention", lambda: logits_of(q, head, flash=True)),
        ("q4_1, flash attention, token by token", lambda: logits_of(q, head, flash=True, n_batch=1)),
        ("q4_1, KV f32", lambda: logits_of(q, head, kv="f32")),
        ("q4_1 layers, output F32, KV f32", lambda: logits_of(other["f32-output"], head, kv="f32")),
        ("F32 layers, output q8_0, KV f32", lambda: logits_of(other["f32-layers"], head, kv="f32")),
        ("F16 weights, KV f16", lambda: logits_of(other["f16"], head)),
        ("F32 weights, KV f16", lambda: logits_of(other["f32"], head)),
        ("F32 weights, KV f32", lambda: logits_of(other["f32"], head, kv="f32")),
        ("F32 weights, KV f32, token by token", lambda: logits_of(other["f32"], head, kv="f32", n_batch=1)),
        ("own float64", lambda: exact.logits(head)),
        ("own float64 + q8 output", lambda: exact.logits(head, q8_output=True)),
        ("own float64 + f16 attention", lambda: exact.logits(head, f16_attn=True)),
        ("own float64, norms changed by 1e-6", lambda: exact.logits(head, jiggle=1e-6)),
        ("own float64 + q8 layers", lambda: exact.logits(head, q8_layers=True)),
        ("own float64 + q8 layers, output", lambda: exact.logits(head, **q8)),
        ("own float64 + q8 layers, output + f16 attention", lambda: exact.logits(head, **q8, f16_attn=True)),
        ("own float64 + q8 layers, output, norms changed by 1e-9",
         lambda: exact.logits(head, **q8, jiggle=1e-9)),
    ]
    refs = {"golden": logits_of(q, head), "float64": exact.logits(head), "own q8": exact.logits(head, **q8)}
    rows = []
    print("| run | against | KL mean | KL p99 | KL max | lumped | top-1 same | rms | max | perplexity |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name, make in runs:
        got = make()
        for ref_name, ref in refs.items():
            r = {"run": name, "against": ref_name, **compare(ref, got, ids)}
            rows.append(r)
            print(f"| {name} | {ref_name} | {r['kl_mean']:.3e} | {r['kl_p99']:.3e} | {r['kl_max']:.3e} | "
                  f"{r['kl_lumped_mean']:.3e} | {r['top1_same']:.4f} | {r['logit_rms']:.5f} | "
                  f"{r['logit_max']:.4f} | {r['ppl']:.4f} |", flush=True)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")


def main():
    args = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    what = args.add_subparsers(required=True)
    p = what.add_parser("golden", help="write the reference files")
    p.add_argument("model")
    p.add_argument("text")
    p.add_argument("--out", required=True)
    p.add_argument("--full")
    p.add_argument("--kv", choices=("f16", "f32"), default="f16")
    p.set_defaults(run=golden_write)
    p = what.add_parser("dequant", help="write the model with float weights")
    p.add_argument("model")
    p.add_argument("--type", choices=("F32", "F16"), required=True)
    p.add_argument("--only", choices=("layers", "embd"))
    p.add_argument("--out", required=True)
    p.set_defaults(run=dequant)
    p = what.add_parser("noise", help="differences inside llama.cpp, and from exact arithmetic")
    p.add_argument("model")
    p.add_argument("text")
    p.add_argument("--work", required=True, help="folder for about 1.7 GB of float models")
    p.add_argument("--json")
    p.set_defaults(run=noise)
    p = what.add_parser("show", help="read the reference files and print their figures")
    p.add_argument("file")
    p.add_argument("--full")
    p.set_defaults(run=golden_show)
    args = args.parse_args()
    args.run(args)


if __name__ == "__main__":
    sys.exit(main())
