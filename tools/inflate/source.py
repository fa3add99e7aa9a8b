"""The small model as the transformation wants it: Hugging Face's names, pairs of a rotation in two halves, float32."""
import glob
import json
import os
import sys

import numpy as np

import files

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "distill"))
from weights import load  # noqa: E402

LAYER_NAMES = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
               "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
               "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def halves(w, dims):
    """Rows of each head of `dims` from (pair, half), GGUF's order of llama, to (half, pair)."""
    return w.reshape(-1, dims // 2, 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


class Source:
    """config: as in config.json; w: float32 arrays [out][in] by name; gguf: the file's metadata, or None."""

    def __init__(self, path):
        self.path, self.gguf = path, None
        if os.path.isdir(path):
            self.read_folder()
        else:
            self.read_gguf()
        c = self.config
        if c["model_type"] != "llama" or c.get("rope_scaling"):
            raise SystemExit(f"{path}: found {c['model_type']}, rope_scaling {c.get('rope_scaling')}, expected a "
                             "llama without scaling")
        self.layers, self.hidden, self.ffn = c["num_hidden_layers"], c["hidden_size"], c["intermediate_size"]
        self.q_heads, self.kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        self.head_dim = c.get("head_dim") or self.hidden // self.q_heads
        self.vocab = len(self.w["model.embed_tokens.weight"])
        self.output = self.w.get("lm_head.weight", self.w["model.embed_tokens.weight"])

    def read_folder(self):
        with open(os.path.join(self.path, "config.json")) as f:
            self.config = json.load(f)
        self.w = {}
        for name in sorted(glob.glob(os.path.join(self.path, "*.safetensors"))):
            self.w |= files.read(name)[1]

    def read_gguf(self):
        self.gguf, tensors = load(self.path)
        get = lambda name: self.gguf[self.gguf["general.architecture"] + "." + name]
        arch = self.gguf["general.architecture"]
        self.config = {
            "model_type": arch, "num_hidden_layers": get("block_count"), "hidden_size": get("embedding_length"),
            "intermediate_size": get("feed_forward_length"), "num_attention_heads": get("attention.head_count"),
            "num_key_value_heads": get("attention.head_count_kv"), "rope_theta": get("rope.freq_base"),
            "max_position_embeddings": get("context_length"), "tie_word_embeddings": "output.weight" not in tensors,
            "rms_norm_eps": get("attention.layer_norm_rms_epsilon")}
        if any(name.startswith("rope_freqs") for name in tensors) or f"{arch}.rope.scaling.type" in self.gguf:
            self.config["rope_scaling"] = "some"
        dims = self.config["hidden_size"] // self.config["num_attention_heads"]
        self.w = {}
        for name, t in tensors.items():
            part = name.split(".")
            if part[0] == "blk":
                t = halves(t, dims) if part[2] in ("attn_q", "attn_k") else t
                self.w[f"model.layers.{part[1]}.{LAYER_NAMES[part[2]]}.weight"] = t
            else:
                self.w[OUTER_NAMES[part[0]] + ".weight"] = t

    def layer(self, l, part):
        return self.w[f"model.layers.{l}.{part}.weight"]
