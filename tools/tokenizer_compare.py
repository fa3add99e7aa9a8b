#!/usr/bin/env python3
"""Compares `specontext tokenize` with the package `tokenizers` line by line.

Usage: tokenizer_compare.py [--marks] PROGRAM MODEL TOKENIZER.json[.xz] TEXT...
PROGRAM is `specontext`; MODEL what it is given with -m (a TOKENIZER.json will do). Prints how many lines have
equal ids, the first that differ, and whether the ids decode to the line. With --marks, text that spells control
tokens gives them on both sides. Exit code 1 when a line differs.
"""
import lzma
import subprocess
import sys

from tokenizers import Tokenizer


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


def main(args):
    marks = "--marks" in args
    program, model, json_path, *paths = [a for a in args if a != "--marks"]
    opener = lzma.open if json_path.endswith(".xz") else open
    reference = Tokenizer.from_str(opener(json_path, "rb").read().decode())
    lines = list(read_lines(paths))
    command = [program, "tokenize", "-m", model, "--lines"] + (["--special"] if marks else [])
    out = subprocess.run(command, input=b"\n".join(lines) + b"\n", stdout=subprocess.PIPE, check=True).stdout
    ours = [[int(i) for i in l.split()] for l in out.decode().split("\n")[:-1]]
    assert len(ours) == len(lines), (len(ours), len(lines))
    theirs = reference.encode_batch([l.decode() for l in lines], add_special_tokens=False)
    differ = 0
    for line, a, b in zip(lines, ours, theirs):
        if a != b.ids:
            differ += 1
            if differ <= 5:
                print("differs:", line.decode()[:200], a[:40], b.ids[:40], sep="\n  ")
    ids = sum(len(i) for i in ours)
    print(f"{len(lines) - differ} of {len(lines)} lines equal; {sum(map(len, lines))} bytes, {ids} ids")
    return differ > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
