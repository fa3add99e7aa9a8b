"""Reads a GGUF file with numpy alone: metadata and tensors of the types that SmolLM2's file has."""
import struct

import numpy as np

SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
F32, F16, Q4_1, Q8_0 = 0, 1, 3, 8
BLOCK = {F32: (1, 4), F16: (1, 2), Q4_1: (32, 20), Q8_0: (32, 34)}  # values, bytes


class Reader:
    def __init__(self, data):
        self.data, self.at = data, 0

    def scalar(self, form):
        value = struct.unpack_from(form, self.data, self.at)[0]
        self.at += struct.calcsize(form)
        return value

    def text(self):
        length = self.scalar("<Q")
        self.at += length
        return bytes(self.data[self.at - length:self.at]).decode("utf-8", "replace")

    def value(self, kind):
        if kind == 8:
            return self.text()
        if kind == 9:
            of, count = self.scalar("<I"), self.scalar("<Q")
            return [self.value(of) for _ in range(count)]
        return self.scalar(SCALARS[kind])


def dequantize(raw, kind, count):
    """raw: bytes of the tensor. Q4_1: f16 scale, f16 least, 16 bytes (low halves are the first 16 values);
    Q8_0: f16 scale, 32 bytes."""
    if kind == F32:
        return raw.view(np.float32)
    if kind == F16:
        return raw.view(np.float16).astype(np.float32)
    blocks = raw.reshape(count // 32, BLOCK[kind][1])
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    if kind == Q8_0:
        return (blocks[:, 2:].copy().view(np.int8) * scale).reshape(-1)
    least = blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
    both = blocks[:, 4:]
    return (np.concatenate([both & 15, both >> 4], axis=1) * scale + least).reshape(-1)


def load(path):
    """Metadata, and tensors by name as float32 arrays [out][in]."""
    r = Reader(np.memmap(path, dtype=np.uint8, mode="r"))
    if r.scalar("<I") != 0x46554747:
        raise SystemExit(f"{path}: found no GGUF file")
    r.scalar("<I")
    tensor_count, pairs = r.scalar("<Q"), r.scalar("<Q")
    meta = {}
    for _ in range(pairs):
        key = r.text()
        meta[key] = r.value(r.scalar("<I"))
    infos = []
    for _ in range(tensor_count):
        name = r.text()
        shape = [r.scalar("<Q") for _ in range(r.scalar("<I"))]
        infos.append((name, shape[::-1], r.scalar("<I"), r.scalar("<Q")))
    align = meta.get("general.alignment", 32)
    first = (r.at + align - 1) // align * align
    tensors = {}
    for name, shape, kind, at in infos:
        if kind not in BLOCK:
            raise SystemExit(f"{path}: tensor {name}: found type {kind}, expected F32, F16, Q4_1 or Q8_0")
        count = int(np.prod(shape))
        raw = np.array(r.data[first + at:first + at + count // BLOCK[kind][0] * BLOCK[kind][1]])
        tensors[name] = dequantize(raw, kind, count).reshape(shape)
    return meta, tensors
