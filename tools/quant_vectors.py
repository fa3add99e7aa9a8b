#!/usr/bin/env python3
"""Writes tests/vectors/quants.bin: random blocks of every quantized type and what the `gguf` package makes
of them.

Needs numpy and gguf (pip). Run again only when a type is added:
  tools/quant_vectors.py tests/vectors/quants.bin

Format, little endian: "QVEC", u32 number of records; a record is u32 type (GGUF's number), u32 elements,
u32 bytes of blocks, the blocks, the elements as float32.
"""
import struct
import sys

import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType as T

# Byte offsets of the f16 fields of a block; all other bytes may be anything.
HALVES = {
    T.Q4_0: [0], T.Q4_1: [0, 2], T.Q5_0: [0], T.Q5_1: [0, 2], T.Q8_0: [0], T.IQ4_NL: [0],
    T.Q2_K: [80, 82], T.Q3_K: [108], T.Q4_K: [0, 2], T.Q5_K: [0, 2], T.Q6_K: [208],
}
ELEMENTS = 1024


def record(kind, halves, rng):
    length, size = GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (ELEMENTS // length, size), dtype=np.uint8)
    for at in halves:
        value = rng.normal(0, 0.05, len(blocks)).astype(np.float16)
        blocks[:, at:at + 2] = value.view(np.uint8).reshape(-1, 2)
    values = quants.dequantize(blocks, kind).astype("<f4").reshape(-1)
    assert len(values) == ELEMENTS
    return struct.pack("<III", kind, ELEMENTS, blocks.size) + blocks.tobytes() + values.tobytes()


def main():
    rng = np.random.default_rng(1)
    with open(sys.argv[1], "wb") as f:
        f.write(b"QVEC" + struct.pack("<I", len(HALVES)))
        for kind, halves in HALVES.items():
            f.write(record(kind, halves, rng))


main()
