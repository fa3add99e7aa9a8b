#!/usr/bin/env python3
"""Makes the English texts of tests/vectors from the novels in Debian's r-cran-janeaustenr.

    apt-get download r-cran-janeaustenr
    python3 tools/make_texts.py --deb r-cran-janeaustenr_*.deb --out tests/vectors
    python3 tools/make_texts.py --deb r-cran-janeaustenr_*.deb --out tests/vectors --check

Only the standard library and dpkg-deb are needed; R is not. The novels lie in the package as an R
lazy-load database: an index of (offset, length) by name, and for each name a compressed, serialised
character vector with one line of the book per element. What is read here is just enough of that format.

The cuts are by chapter and by paragraph, never by tokens, so that no model is needed to repeat them.
--check compares with the files already there and changes nothing.
"""
import argparse
import gzip
import io
import json
import pathlib
import re
import struct
import subprocess
import sys
import tarfile
import zlib

DATA = "./usr/lib/R/site-library/janeaustenr/data/Rdata"

# Chapter numbers are as printed in the book.
DEMO = {"novel": "sensesensibility", "chapters": (4, 6)}
DEMO_QUESTION = "What is the name of the house where the Dashwoods go to live?"
# What SmolLM2-135M-Instruct answers with the whole document in its context; see text/README.md.
DEMO_ANSWER = "The house where the Dashwoods go to live is Barton Cottage."
TEACHER = {"novel": "persuasion", "chapters": (1, 1), "bytes_max": 5600}

# Different lengths, first words and tasks, so that sessions which run together share no prefix beyond
# the chat template's and finish at different times.
PROMPTS = [
    "What is the capital of France?",
    "Name three primary colours.",
    "Write one sentence about the sea.",
    "How many days are there in a week?",
    "Explain in two sentences why the sky is blue.",
    "Give me a word that rhymes with \"light\".",
    "Translate \"good morning\" into Spanish.",
    "What is 12 plus 30?",
    "List four animals that live in a forest.",
    "Who wrote the play \"Hamlet\"?",
    "Describe the taste of a lemon to someone who has never eaten one.",
    "Suggest a name for a small grey cat.",
    "What do bees make?",
    "Write a short poem of four lines about winter.",
    "Which planet is known as the red planet?",
    "Tell me one reason to drink water every day.",
    "Complete the sentence: The early bird catches",
    "What is the opposite of \"ancient\"?",
    "Give a simple recipe for pancakes in five steps.",
    "In which season do leaves fall from the trees?",
    "Write a polite reply to a letter that invites you to dinner on Friday evening.",
    "What is photosynthesis?",
    "Name the largest ocean on Earth.",
    "Make a shopping list for a vegetable soup.",
    "How does a bicycle stay upright while it is moving?",
    "Write a C function that returns the larger of two integers.",
    "Why do people shake hands when they meet?",
    "Count from one to ten in words.",
    "What sound does an owl make?",
    "Summarise this in one sentence: A farmer had three sons. The eldest went to sea, the second became "
    "a baker, and the youngest stayed at home to keep the farm.",
    "Can a square have five sides? Answer yes or no and say why.",
    "Please write the first line of a letter to an old friend.",
]


class RData:
    """Reads one value of R's XDR serialisation (`X\\n`), as far as names, numbers, strings and lists go."""

    def __init__(self, raw):
        if raw[:2] != b"X\n":
            raise ValueError(f"serialised R value: expected 'X\\n', found {raw[:2]!r}")
        self.raw, self.at, self.symbols = raw, 2, []
        version = self.int()
        self.at += 8  # the versions of R that wrote it and that can read it
        if version == 3:
            name_bytes = self.int()
            self.at += name_bytes  # the name of the native encoding

    def int(self):
        self.at += 4
        return struct.unpack_from(">i", self.raw, self.at - 4)[0]

    def array(self, code, size):
        n = self.int()
        self.at += n * size
        return list(struct.unpack_from(f">{n}{code}", self.raw, self.at - n * size))

    def pairs(self, flags):
        if flags & 0x200:
            self.item()
        tag = self.item() if flags & 0x400 else None
        head = self.item()
        return [(tag, head)] + (self.item() or [])

    def item(self):
        flags = self.int()
        kind = flags & 0xff
        if kind == 0xfe:  # NULL
            return None
        if kind == 0xff:  # a symbol seen before
            return self.symbols[(flags >> 8 or self.int()) - 1]
        if kind == 1:  # a new symbol
            self.symbols.append(self.item())
            return self.symbols[-1]
        if kind == 2:
            return self.pairs(flags)
        if kind == 9:  # one string
            n = self.int()
            self.at += max(n, 0)
            return None if n < 0 else self.raw[self.at - n:self.at].decode("utf-8")
        if kind in (10, 13):
            value = self.array("i", 4)
        elif kind == 14:
            value = self.array("d", 8)
        elif kind in (16, 19):
            value = [self.item() for _ in range(self.int())]
        else:
            raise ValueError(f"serialised R value: kind {kind} at byte {self.at} is not handled")
        if flags & 0x200:
            names = dict(self.item()).get("names")
            if kind == 19 and names:
                value = dict(zip(names, value))
        return value


def novels_read(deb):
    """All novels of the package, by R name: a list of lines each."""
    tar = subprocess.run(["dpkg-deb", "--fsys-tarfile", deb], check=True, stdout=subprocess.PIPE).stdout
    with tarfile.open(fileobj=io.BytesIO(tar)) as files:
        index = RData(gzip.decompress(files.extractfile(DATA + ".rdx").read())).item()
        data = files.extractfile(DATA + ".rdb").read()
    novels = {}
    for name, (offset, length) in index["variables"].items():
        chunk = data[offset:offset + length]
        size = struct.unpack_from(">I", chunk)[0]
        raw = zlib.decompress(chunk[4:])
        if len(raw) != size:
            raise ValueError(f"{name}: expected {size} bytes after decompression, found {len(raw)}")
        novels[name] = RData(raw).item()
    return novels


def paragraphs(lines):
    """The book's hard line breaks are typography; a paragraph becomes one line."""
    out, held = [], []
    for line in lines + [""]:
        if line.strip():
            held.append(line.strip())
        elif held:
            out.append(re.sub(r" +", " ", " ".join(held)))
            held = []
    return out


def chapters(lines, first, last):
    heading = re.compile(r"chapter [0-9ivxlc]+", re.I)
    starts = [i for i, line in enumerate(lines) if heading.fullmatch(line.strip())]
    starts.append(len(lines))
    return paragraphs(lines[starts[first - 1]:starts[last]])


def texts_make(novels):
    """Path below tests/vectors -> bytes."""
    demo = "\n\n".join(chapters(novels[DEMO["novel"]], *DEMO["chapters"])) + "\n"
    teacher, size = [], 0
    for text in chapters(novels[TEACHER["novel"]], *TEACHER["chapters"]):
        size += len(text.encode()) + 2
        if size > TEACHER["bytes_max"]:
            break
        teacher.append(text)
    prompts = "".join(json.dumps(p, ensure_ascii=False) + "\n" for p in PROMPTS)
    if len(set(PROMPTS)) != 32:
        raise ValueError(f"prompts: expected 32 different ones, found {len(set(PROMPTS))}")
    out = {
        "demo/document.txt": demo,
        "demo/question.txt": DEMO_QUESTION + "\n",
        "demo/answer.txt": DEMO_ANSWER + "\n",
        "text/teacher.txt": "\n\n".join(teacher) + "\n",
        "prompts32.jsonl": prompts,
    }
    return {path: text.encode("utf-8") for path, text in out.items()}


def main():
    args = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    args.add_argument("--deb", required=True, help="the package file r-cran-janeaustenr_*.deb")
    args.add_argument("--out", required=True, type=pathlib.Path, help="the folder tests/vectors")
    args.add_argument("--check", action="store_true", help="compare only; status 1 if a file differs")
    args = args.parse_args()
    different = 0
    for path, text in texts_make(novels_read(args.deb)).items():
        target = args.out / path
        if args.check:
            same = target.is_file() and target.read_bytes() == text
            different += not same
            print(f"{target}: {'same' if same else 'DIFFERENT'}")
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(text)
            print(f"{target}: {len(text)} bytes")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
