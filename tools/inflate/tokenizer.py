"""tokenizer.json and tokenizer_config.json out of a GGUF file's metadata (byte-level BPE)."""
import json
import os

NORMAL, CONTROL = 1, 3
PRE = {"gpt-2": [], "smollm": [{"type": "Digits", "individual_digits": True}]}


def write_json(folder, name, value):
    with open(os.path.join(folder, name), "w") as f:
        json.dump(value, f, indent=1, ensure_ascii=False)
        f.write("\n")


def write(meta, folder):
    get = lambda key, otherwise=None: meta.get("tokenizer.ggml." + key, otherwise)
    if get("model") != "gpt2" or get("pre") not in PRE:
        raise SystemExit(f"tokenizer: found {get('model')}, {get('pre')}, expected gpt2 with {' or '.join(PRE)}")
    tokens, types = get("tokens"), get("token_type")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    added = [{"id": i, "content": t, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
              "special": kind == CONTROL} for i, (t, kind) in enumerate(zip(tokens, types)) if kind != NORMAL]
    write_json(folder, "tokenizer.json", {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": PRE[get("pre")] + [byte_level]},
        "post_processor": None, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                  "vocab": {t: i for i, t in enumerate(tokens)}, "merges": get("merges")}})
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": bool(get("add_bos_token", False)),
              "add_prefix_space": False, "clean_up_tokenization_spaces": False}
    for name in ("bos", "eos"):
        if get(name + "_token_id") is not None:
            config[name + "_token"] = tokens[get(name + "_token_id")]
    if "tokenizer.chat_template" in meta:
        config["chat_template"] = meta["tokenizer.chat_template"]
    write_json(folder, "tokenizer_config.json", config)
    return {name + "_token_id": get(name + "_token_id") for name in ("bos", "eos")
            if get(name + "_token_id") is not None}
