#!/usr/bin/env python3
"""Compares `specontext tokenize` line by line with a reference: the package `tokenizers`, or llama.cpp for a GGUF.

Usage: tokenizer_compare.py [--marks] PROGRAM MODEL REFERENCE TEXT...
PROGRAM is `specontext`; MODEL what it is given with -m (a tokenizer.json will do); REFERENCE a tokenizer.json[.xz]
(package tokenizers) or a .gguf (package llama_cpp). Prints how many lines have equal ids, the first that differ, and
how fast ours was on all of them by its own clock, the start of the program included. With --marks, text that spells
control tokens gives them on both sides. Exit code 1 when a line differs.
"""
import lzma
import subprocess
import sys
import time


def read_lines(paths):
    for path in paths:
        data = open(path, "rb").read()
        for line in data.split(b"\n"):
            try:
                line.decode()
            except UnicodeDecodeError:
                continue
            if line:
                yield line


def reference_ids(path, lines, marks):
    """Ids of each line by the reference."""
    if path.endswith(".gguf"):
        import llama_cpp
        model = llama_cpp.Llama(path, vocab_only=True, verbose=False)
        return [model.tokenize(l, add_bos=False, special=marks) for l in lines]
    from tokenizers import Tokenizer
    opener = lzma.open if path.endswith(".xz") else open
    tokenizer = Tokenizer.from_str(opener(path, "rb").read().decode())
    return [e.ids for e in tokenizer.encode_batch([l.decode() for l in lines], add_special_tokens=False)]


def main(args):
    marks = "--marks" in args
    program, model, reference, *paths = [a for a in args if a != "--marks"]
    lines = list(read_lines(paths))
    command = [program, "tokenize", "-m", model, "--lines"] + (["--special"] if marks else [])
    begin = time.monotonic()
    out = subprocess.run(command, input=b"\n".join(lines) + b"\n", stdout=subprocess.PIPE, check=True).stdout
    seconds = time.monotonic() - begin
    ours = [[int(i) for i in l.split()] for l in out.decode().split("\n")[:-1]]
    assert len(ours) == len(lines), (len(ours), len(lines))
    theirs = reference_ids(reference, lines, marks)
    differ = 0
    for line, a, b in zip(lines, ours, theirs):
        if a != b:
            differ += 1
            if differ <= 5:
                print("differs:", line.decode()[:200], a[:40], b[:40], sep="\n  ")
    ids = sum(len(i) for i in ours)
    total = sum(map(len, lines))
    print(f"{len(lines) - differ} of {len(lines)} lines equal; {total} bytes, {ids} ids; {total / seconds / 1e6:.1f} MB/s")
    return differ > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
