"""Safetensors files with numpy alone: read whole, written tensor by tensor while they are made."""
import json
import struct

import numpy as np

PIECE = 1 << 17
TYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


def round_bf16(x):
    """float32 -> bfloat16 as uint16, to the nearest, ties to even; in pieces that stay in the cache."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).reshape(-1)
    out = np.empty(bits.size, np.uint16)
    for at in range(0, bits.size, PIECE):
        b = bits[at:at + PIECE]
        t = b >> 16
        t &= 1
        t += 0x7FFF
        t += b
        t >>= 16
        out[at:at + PIECE] = t
    return out.reshape(np.shape(x))


def encode(x, kind):
    return round_bf16(x) if kind == "BF16" else np.ascontiguousarray(x, TYPES[kind])


def read(path):
    """Metadata (strings), and tensors by name as float32."""
    with open(path, "rb") as f:
        header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
        data = f.read()
    metadata, tensors = header.pop("__metadata__", {}), {}
    for name, t in header.items():
        if t["dtype"] not in TYPES:
            raise SystemExit(f"{path}: tensor {name}: found type {t['dtype']}, expected {', '.join(TYPES)}")
        raw = np.frombuffer(data[slice(*t["data_offsets"])], TYPES[t["dtype"]])
        if t["dtype"] == "BF16":
            raw = (raw.astype(np.uint32) << 16).view(np.float32)
        tensors[name] = raw.astype(np.float32).reshape(t["shape"])
    return metadata, tensors


def write(path, shapes, blocks, kind_of, metadata=None):
    """shapes: {name: shape} in the file's order; kind_of(name): its type; blocks: arrays that follow one another,
    each of them (name, whole rows), together all rows of all tensors in that order. Returns the tensors' bytes."""
    header, at = {"__metadata__": metadata or {"format": "pt"}}, 0
    for name, shape in shapes.items():
        size = int(np.prod(shape)) * np.dtype(TYPES[kind_of(name)]).itemsize
        header[name] = {"dtype": kind_of(name), "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for name, rows in blocks:
            f.write(encode(rows, kind_of(name)).data)
        if f.tell() != 8 + len(text) + at:
            raise SystemExit(f"{path}: wrote {f.tell()} bytes, expected {8 + len(text) + at}")
    return at
