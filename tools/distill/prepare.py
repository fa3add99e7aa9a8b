#!/usr/bin/env python3
"""Makes the training tokens of a retrieval head out of Debian's documentation packages.

Usage: prepare.py -m MODEL -s SPECONTEXT -o TOKENS.npz [--cap N] [--recall N] ROOT

ROOT is a folder into which the packages were unpacked:
    apt-get download linux-doc-6.1 r-cran-janeaustenr postgresql-doc-15 python3.11-doc vim-runtime perl-doc
    for f in *.deb; do dpkg -x $f ROOT; done
and the library sources of Python 3.11 are read where Debian installs them. TOKENS.npz holds: tokens uint16, all
documents one after another; starts int64 [documents + 1]; names; held [documents], true for documents that are
only evaluated on; prefix uint16, the opening of a chat. Whole documents are held out, chosen by a hash of their names.
The novel that the demonstration uses is left out altogether.
"""
import argparse
import gzip
import hashlib
import html
import os
import re
import subprocess
import zlib

import numpy as np

import recall

CHAT = ("<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\n")
NEVER = "sensesensibility"
HELD_NOVEL = "persuasion"
SOURCES = "/usr/lib/python3.11"


def strings_of(data):
    """The strings of a serialised R object, each with its 32-bit length before it (type 9 in the flags)."""
    at = data.find(b"\x00\x00\x00\x10")
    count = int.from_bytes(data[at + 4:at + 8], "big")
    at += 8
    for _ in range(count):
        length = int.from_bytes(data[at + 4:at + 8], "big")
        yield data[at + 8:at + 8 + length].decode("utf-8", "replace")
        at += 8 + length


def novels(root):
    """R keeps each novel, lines of text, as a compressed block; the index gives them in order of their names."""
    folder = os.path.join(root, "usr/lib/R/site-library/janeaustenr/data")
    with open(os.path.join(folder, "Rdata.rdx"), "rb") as f:
        index = zlib.decompress(f.read(), 31)
    begin = index.index(b"names")
    names = [n.decode() for n in re.findall(rb"\x00\x04\x00\x09\x00\x00\x00.([a-z]{4,})", index[begin:], re.S)][:6]
    pairs = re.findall(rb"\x00\x00\x00\x0d\x00\x00\x00\x02(.{8})", index[:begin], re.S)
    with open(os.path.join(folder, "Rdata.rdb"), "rb") as f:
        blocks = f.read()
    for name, pair in zip(names, pairs):
        at, length = int.from_bytes(pair[:4], "big"), int.from_bytes(pair[4:], "big")
        if name == NEVER:
            continue
        lines = list(strings_of(zlib.decompress(blocks[at + 4:at + length])))
        text = "\n".join(lines)
        if "Dashwood" in text:
            raise SystemExit(f"{name}: found the novel of the demonstration, expected another")
        yield "novel/" + name, re.sub(r"(?<=\S)\n(?=\S)", " ", text)


def read(path):
    with (gzip.open if path.endswith(".gz") else open)(path, "rb") as f:
        return f.read().decode("utf-8", "replace")


def strip_html(text):
    text = re.sub(r"(?is)<(script|style|head|nav)\b.*?</\1>", "", text)
    text = re.sub(r"(?i)<(/?p|/?div|br|/?li|/?tr|/?h\d|/?pre|/?dt|/?dd)\b[^>]*>", "\n", text)
    return re.sub(r"\n\s*\n+", "\n\n", html.unescape(re.sub(r"<[^>]+>", "", text)))


def files(domain, folder, endings, convert=lambda text: text, whole_folders=False):
    """A document a file, or, where files are short, a document a folder."""
    for path, folders, names in os.walk(folder):
        folders[:] = sorted(f for f in folders if f not in ("translations", "test", "tests", "html"))
        texts = []
        for name in sorted(names):
            if not name.endswith(endings):
                continue
            text = convert(read(os.path.join(path, name)))
            if whole_folders:
                texts.append(text)
            else:
                yield f"{domain}/{os.path.relpath(os.path.join(path, name), folder)}", text
        if texts:
            yield f"{domain}/{os.path.relpath(path, folder)}", "\n\n".join(texts)


def pieces(texts, characters=120000):
    for name, text in texts:
        for at in range(0, len(text), characters):
            yield f"{name}/{at}", text[at:at + characters]


def manual(root):
    """The Python manual in one file; its parts lie between form feeds."""
    pages = read(os.path.join(root, "usr/share/info/python3.11.info.gz")).split("\x1f")
    text = [re.sub(r"\n?File: .*?Up: [^\n]*\n", "", p) for p in pages]
    for i in range(0, len(text), 40):
        yield f"python/{i}", "".join(text[i:i + 40])


def documents(root):
    share = os.path.join(root, "usr/share")
    return {
        "novel": novels(root),
        "linux": files("linux", os.path.join(share, "doc/linux-doc-6.1/Documentation"),
                       (".rst.gz", ".rst", ".txt", ".txt.gz"), whole_folders=True),
        "postgresql": pieces(files("postgresql", os.path.join(share, "doc/postgresql-doc-15/html"), (".html",),
                                   strip_html, True)),
        "python": manual(root),
        "vim": files("vim", os.path.join(share, "vim/vim90/doc"), (".txt",)),
        "perl": files("perl", os.path.join(share, "perl"), (".pod",)),
        "code": files("code", SOURCES, (".py",)),
    }


def is_held(name):
    if name.startswith("novel/"):
        return name == "novel/" + HELD_NOVEL
    return hashlib.md5(name.encode()).digest()[0] < 26


def main():
    a = argparse.ArgumentParser()
    a.add_argument("-m", "--model", required=True)
    a.add_argument("-s", "--specontext", default="specontext")
    a.add_argument("-o", "--output", required=True)
    a.add_argument("--cap", type=int, default=900000, help="most tokens of one kind of text")
    a.add_argument("--least", type=int, default=3000, help="shorter documents are left out")
    a.add_argument("--most", type=int, default=60000, help="tokens taken of one document that is no novel")
    a.add_argument("--extra", action="append", default=[], help="a text to evaluate on, for example the demo's")
    a.add_argument("--recall", type=int, default=0, help="made-up documents of facts said once and asked for later")
    a.add_argument("root")
    o = a.parse_args()

    def tokenize(text, *more):
        out = subprocess.run([o.specontext, "tokenize", "-m", o.model, "--ids", "-f", "-", *more],
                             input=text.encode(), capture_output=True, check=True).stdout
        return np.array(out.split(), dtype=np.uint16)

    tokens, names = [], []
    for path in o.extra:
        tokens.append(tokenize(read(path)))
        names.append("extra/" + os.path.basename(path))
    of = documents(o.root)
    if o.recall:
        base = [t for kind in ("novel", "linux", "python") for n, t in documents(o.root)[kind] if not is_held(n)]
        of["recall"] = recall.documents(base, o.recall)
    for kind, texts in of.items():
        texts = [(n, t) for n, t in texts if len(t) > 2 * o.least]
        texts.sort(key=lambda d: hashlib.sha1(d[0].encode()).digest())
        total, count = 0, 0
        for name, text in texts:
            ids = tokenize(text if kind == "novel" else text[:6 * o.most])
            ids = ids if kind == "novel" else ids[:o.most]
            if len(ids) < o.least:
                continue
            tokens.append(ids)
            names.append(name)
            total, count = total + len(ids), count + 1
            if total > o.cap and kind != "novel":
                break
        print(f"{kind}: {count} documents, {total} tokens", flush=True)
    held = np.array([n.startswith("extra/") or is_held(n) for n in names])
    starts = np.cumsum([0] + [len(t) for t in tokens])
    np.savez_compressed(o.output, tokens=np.concatenate(tokens), starts=starts, names=np.array(names), held=held,
                        prefix=tokenize(CHAT, "--special"))
    print(f"all: {len(names)} documents ({held.sum()} held out), {starts[-1]} tokens")


if __name__ == "__main__":
    main()
