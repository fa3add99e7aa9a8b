#!/usr/bin/env python3
"""An independent float64 model in numpy, and the golden vectors that it makes: tests/vectors/arch/.

Usage: reference_model.py vectors DIRECTORY      writes NAME/{config.json,tokens.txt,logits.f32} for every case
       reference_model.py folder NAME DIRECTORY  writes the case as a Hugging Face folder
       reference_model.py gguf NAME FILE         writes it as GGUF, float32 (package gguf)
       reference_model.py llama-cpp              compares every case with llama.cpp (packages gguf, llama_cpp)

Weights follow from their names (see `weight`), so that tests make the same files themselves. They are multiples
of powers of two with 8 significant bits: the same in F32, F16 and BF16.
"""
import json
import os
import struct
import sys

import numpy as np

PROMPT, STEPS = 40, 32
BASE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 96, "vocab_size": 128, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "rope_scaling": None, "tie_word_embeddings": False, "hidden_act": "silu",
        "torch_dtype": "float32"}
CLASSES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
           "qwen3": "Qwen3ForCausalLM"}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
CASES = {
    "llama-gqa": ("llama", {}),
    "llama-mha-tied": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 1e5,
                                 "torch_dtype": "float16"}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1, "torch_dtype": "bfloat16"}),
    "llama3-scaling": ("llama", {"rope_theta": 500000.0, "rope_scaling": LLAMA3, "tie_word_embeddings": True,
                                 "torch_dtype": "bfloat16"}),
    "llama-linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "llama-yarn": ("llama", {"rope_scaling": YARN}),
    "mistral": ("mistral", {"sliding_window": None, "rope_theta": 1e6, "torch_dtype": "float16"}),
    "qwen2": ("qwen2", {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "torch_dtype": "bfloat16",
                        "use_sliding_window": False, "sliding_window": 64}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1, "torch_dtype": "float16"}),
    "qwen3": ("qwen3", {"head_dim": 32, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True,
                        "attention_bias": False, "torch_dtype": "bfloat16"}),
    "qwen3-yarn": ("qwen3", {"head_dim": 32, "rope_scaling": YARN, "torch_dtype": "float16"}),
}


def config_of(name):
    arch, changes = CASES[name]
    return {**BASE, "model_type": arch, "architectures": [CLASSES[arch]], **changes}


def head_dim(c):
    return c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]


def mix(x):
    """splitmix64's finish, on arrays."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def fnv1a(text):
    h = 0xCBF29CE484222325
    for b in text.encode():
        h = (h ^ b) * 0x100000001B3 % 2**64
    return h


def weight(name, shape):
    """Element i: v = the top byte of mix(fnv1a(name) + i * golden), signed. Norms 1 + floor(v / 8) / 64, biases
    v / 256, the embedding v / 128, other matrices v / 512."""
    n = int(np.prod(shape))
    with np.errstate(over="ignore"):
        x = mix(np.uint64(fnv1a(name)) + np.arange(n, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    v = (x >> np.uint64(56)).astype(np.uint8).view(np.int8).astype(np.float64)
    if "norm" in name:
        w = 1 + np.floor(v / 8) / 64
    else:
        w = v / (256 if name.endswith(".bias") else 128 if "embed" in name else 512)
    return w.reshape(shape)


def shapes_of(c):
    h, d, ffn, vocab = c["hidden_size"], head_dim(c), c["intermediate_size"], c["vocab_size"]
    q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
    shapes = {"model.embed_tokens.weight": (vocab, h)}
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        shapes |= {p + "input_layernorm.weight": (h,), p + "self_attn.q_proj.weight": (q, h),
                   p + "self_attn.k_proj.weight": (kv, h), p + "self_attn.v_proj.weight": (kv, h),
                   p + "self_attn.o_proj.weight": (h, q), p + "post_attention_layernorm.weight": (h,),
                   p + "mlp.gate_proj.weight": (ffn, h), p + "mlp.up_proj.weight": (ffn, h),
                   p + "mlp.down_proj.weight": (h, ffn)}
        if c["model_type"] == "qwen2":
            shapes |= {p + f"self_attn.{x}_proj.bias": (n,) for x, n in (("q", q), ("k", kv), ("v", kv))}
        if c["model_type"] == "qwen3":
            shapes |= {p + f"self_attn.{x}_norm.weight": (d,) for x in "qk"}
    shapes["model.norm.weight"] = (h,)
    if not c["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, h)
    return shapes


def rope_of(c):
    """Frequencies [d / 2] and what cos and sin are multiplied by."""
    d, s = head_dim(c), c["rope_scaling"]
    f = c["rope_theta"] ** (-np.arange(0, d, 2) / d)
    kind = s and s.get("rope_type", s.get("type"))
    if kind == "linear":
        return f / s["factor"], 1.0
    if kind == "llama3":
        wave = 2 * np.pi / f
        old, low, high = s["original_max_position_embeddings"], s["low_freq_factor"], s["high_freq_factor"]
        smooth = (old / wave - low) / (high - low)
        mixed = (1 - smooth) * f / s["factor"] + smooth * f
        return np.where(wave < old / high, f, np.where(wave > old / low, f / s["factor"], mixed)), 1.0
    if kind == "yarn":
        old = s["original_max_position_embeddings"]
        dim = lambda turns: d * np.log(old / (turns * 2 * np.pi)) / (2 * np.log(c["rope_theta"]))
        low, high = max(np.floor(dim(32)), 0), min(np.ceil(dim(1)), d - 1)
        ramp = np.clip((np.arange(d // 2) - low) / max(high - low, 1e-3), 0, 1)
        return f / s["factor"] * ramp + f * (1 - ramp), 0.1 * np.log(s["factor"]) + 1
    return f, 1.0


class Model:
    """Keys and values of all positions so far; feeding tokens one by one or many at once is the same."""

    def __init__(self, c):
        self.c, self.d = c, head_dim(c)
        self.w = {n: weight(n, s) for n, s in shapes_of(c).items()}
        self.freq, self.scale = rope_of(c)
        self.kv = [([], []) for _ in range(c["num_hidden_layers"])]

    def norm(self, x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.c["rms_norm_eps"]) * self.w[name]

    def rotate(self, x, position):
        angle = position * self.freq
        cos, sin = np.cos(angle) * self.scale, np.sin(angle) * self.scale
        a, b = x[:, : self.d // 2], x[:, self.d // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def heads(self, x, p, kind):
        y = self.w[p + f"self_attn.{kind}_proj.weight"] @ x + self.w.get(p + f"self_attn.{kind}_proj.bias", 0)
        y = y.reshape(-1, self.d)
        norm = p + f"self_attn.{kind}_norm.weight"
        return self.norm(y, norm) if norm in self.w else y

    def step(self, token):
        x = self.w["model.embed_tokens.weight"][token]
        group = self.c["num_attention_heads"] // self.c["num_key_value_heads"]
        for i, (keys, values) in enumerate(self.kv):
            p = f"model.layers.{i}."
            n = self.norm(x, p + "input_layernorm.weight")
            q = self.rotate(self.heads(n, p, "q"), len(keys))
            keys.append(self.rotate(self.heads(n, p, "k"), len(keys)))
            values.append(self.heads(n, p, "v"))
            k, v = np.stack(keys, 1), np.stack(values, 1)
            out = []
            for h in range(len(q)):
                s = k[h // group] @ q[h] / np.sqrt(self.d)
                e = np.exp(s - s.max())
                out.append(e / e.sum() @ v[h // group])
            x = x + self.w[p + "self_attn.o_proj.weight"] @ np.concatenate(out)
            n = self.norm(x, p + "post_attention_layernorm.weight")
            gate = self.w[p + "mlp.gate_proj.weight"] @ n
            x = x + self.w[p + "mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) *
                                                          (self.w[p + "mlp.up_proj.weight"] @ n))
        head = self.w.get("lm_head.weight", self.w["model.embed_tokens.weight"])
        return head @ self.norm(x, "model.norm.weight")


def run(c):
    """Logits of PROMPT + STEPS positions; the first PROMPT tokens are given, the others the likeliest."""
    tokens = [int(t) for t in mix(np.arange(1, PROMPT + 1, dtype=np.uint64)) % np.uint64(c["vocab_size"])]
    model, logits = Model(c), []
    for i in range(PROMPT + STEPS):
        logits.append(model.step(tokens[i]))
        if PROMPT <= i + 1 < PROMPT + STEPS:
            tokens.append(int(np.argmax(logits[-1])))
    return tokens, np.array(logits)


def write_vectors(directory):
    for name in CASES:
        folder = os.path.join(directory, name)
        os.makedirs(folder, exist_ok=True)
        c = config_of(name)
        tokens, logits = run(c)
        with open(os.path.join(folder, "config.json"), "w") as f:
            f.write(json.dumps(c, indent=2) + "\n")
        with open(os.path.join(folder, "tokens.txt"), "w") as f:
            f.write(" ".join(map(str, tokens)) + "\n")
        logits.astype("<f4").tofile(os.path.join(folder, "logits.f32"))
        top = np.sort(logits, -1)
        print(name, "least gap between first and second:", (top[:, -1] - top[:, -2])[PROMPT - 1 :].min())


def encode(w, dtype):
    if dtype == "bfloat16":
        return (w.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes(), "BF16"
    return w.astype("<f2" if dtype == "float16" else "<f4").tobytes(), "F16" if dtype == "float16" else "F32"


def write_folder(name, directory):
    c, header, blobs, at = config_of(name), {}, [], 0
    os.makedirs(directory, exist_ok=True)
    for n, s in shapes_of(c).items():
        data, kind = encode(weight(n, s), c["torch_dtype"])
        header[n] = {"dtype": kind, "shape": list(s), "data_offsets": [at, at + len(data)]}
        blobs.append(data)
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(os.path.join(directory, "model.safetensors"), "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + b"".join(blobs))
    with open(os.path.join(directory, "config.json"), "w") as f:
        json.dump(c, f, indent=2)


GGUF_NAMES = {"input_layernorm.weight": "attn_norm.weight", "post_attention_layernorm.weight": "ffn_norm.weight",
              "self_attn.o_proj.weight": "attn_output.weight", "mlp.gate_proj.weight": "ffn_gate.weight",
              "mlp.up_proj.weight": "ffn_up.weight", "mlp.down_proj.weight": "ffn_down.weight",
              "self_attn.q_norm.weight": "attn_q_norm.weight", "self_attn.k_norm.weight": "attn_k_norm.weight"}
GGUF_OUTER = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
              "lm_head.weight": "output.weight"}


def gguf_name(name):
    if name in GGUF_OUTER:
        return GGUF_OUTER[name]
    _, _, layer, rest = name.split(".", 3)
    rest = GGUF_NAMES.get(rest) or rest.replace("self_attn.", "attn_").replace("_proj", "")
    return f"blk.{layer}.{rest}"


def permute(w, heads):
    """Rows (half, j) of a head to (j, half): GGUF's order of llama."""
    return w.reshape(heads, 2, -1, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def write_gguf(name, path):
    from gguf import GGUFWriter

    c = config_of(name)
    arch = "llama" if c["model_type"] == "mistral" else c["model_type"]
    writer = GGUFWriter(path, arch)
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_head_count(c["num_attention_heads"])
    writer.add_head_count_kv(c["num_key_value_heads"])
    writer.add_key_length(head_dim(c))
    writer.add_value_length(head_dim(c))
    writer.add_rope_dimension_count(head_dim(c))
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    writer.add_rope_freq_base(c["rope_theta"])
    writer.add_vocab_size(c["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    s = c["rope_scaling"]
    kind = s and s.get("rope_type", s.get("type"))
    if kind in ("linear", "yarn"):
        writer.add_string(f"{arch}.rope.scaling.type", kind)
        writer.add_rope_scaling_factor(s["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(s["original_max_position_embeddings"])
    if kind == "llama3":
        plain = c["rope_theta"] ** (-np.arange(0, head_dim(c), 2) / head_dim(c))
        writer.add_tensor("rope_freqs.weight", (plain / rope_of(c)[0]).astype(np.float32))
    for n, shape in shapes_of(c).items():
        w = weight(n, shape)
        if arch == "llama" and ("q_proj" in n or "k_proj" in n):
            w = permute(w, c["num_attention_heads" if "q_proj" in n else "num_key_value_heads"])
        writer.add_tensor(gguf_name(n), w.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def compare_llama_cpp():
    import tempfile

    import llama_cpp

    for name in CASES:
        tokens, logits = run(config_of(name))
        with tempfile.NamedTemporaryFile(suffix=".gguf") as f:
            write_gguf(name, f.name)
            model = llama_cpp.Llama(f.name, n_ctx=128, logits_all=True, verbose=False, flash_attn=False,
                                    type_k=0, type_v=0)
            model.eval(tokens)
            theirs = model.scores[: len(tokens)]
        print(f"{name}: largest difference {np.abs(theirs - logits).max():.2e}, of logits up to "
              f"{np.abs(logits).max():.2f}")


if __name__ == "__main__":
    verbs = {"vectors": write_vectors, "folder": write_folder, "gguf": write_gguf, "llama-cpp": compare_llama_cpp}
    if len(sys.argv) < 2 or sys.argv[1] not in verbs:
        sys.exit(__doc__)
    verbs[sys.argv[1]](*sys.argv[2:])
