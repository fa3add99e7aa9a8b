#!/usr/bin/env python3
"""Fetches the texts that `make eval` measures on, out of Debian packages. All three are in the public domain, and the
training of the heads in heads/ saw none of them:

    novel.txt    Persuasion, by Jane Austen (1817), from r-cran-janeaustenr; its begin is left out, since
                 tests/vectors/text has it
    jargon.txt   The Jargon File 4.4.7, from jargon-text: a dictionary, many short entries
    sqlite.txt   sqlite3.h, from libsqlite3-dev: C declarations with the manual in their comments

    python3 tools/eval_texts.py --out build/eval

The packages stay in OUT, so that a second call downloads nothing. Only the standard library, apt-get and dpkg-deb are
needed.
"""
import argparse
import gzip
import pathlib
import subprocess
import sys
import tempfile

from make_texts import chapters, novels_read

BYTES = 80000  # of each text: more than 8192 tokens of any tokenizer that is of use
PACKAGES = ["r-cran-janeaustenr", "jargon-text", "libsqlite3-dev"]


def package(out, name):
    """The package's file, downloaded when it is not there."""
    if not list(out.glob(f"{name}_*.deb")):
        subprocess.run(["apt-get", "download", "-qq", name], cwd=out, check=True)
    return str(sorted(out.glob(f"{name}_*.deb"))[-1])


def member(deb, suffix):
    """Text of the package's file whose path ends so."""
    with tempfile.TemporaryDirectory() as root:
        subprocess.run(["dpkg-deb", "-x", deb, root], check=True)
        found = [p for p in pathlib.Path(root).rglob("*") if p.is_file() and str(p).endswith(suffix)]
        if len(found) != 1:
            raise ValueError(f"{deb}: expected one file *{suffix}, found {len(found)}")
        if found[0].suffix == ".gz":
            return gzip.decompress(found[0].read_bytes()).decode("utf-8", "replace")
        return found[0].read_text(encoding="utf-8", errors="replace")


def cut(text, first):
    """BYTES from the first whole paragraph behind `first` on."""
    data = text.encode("utf-8")
    begin = data.index(b"\n\n", first) + 2 if first else 0
    data = data[begin:begin + BYTES]
    return data[:data.rindex(b"\n")] + b"\n"


def main():
    args = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    args.add_argument("--out", required=True, type=pathlib.Path, help="folder of packages and texts")
    out = args.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    novel, jargon, sqlite = (package(out, name) for name in PACKAGES)
    texts = {
        "novel.txt": ("\n\n".join(chapters(novels_read(novel)["persuasion"], 3, 12)) + "\n", 0),
        "jargon.txt": (member(jargon, "/jargon.txt.gz"), 60000),
        "sqlite.txt": (member(sqlite, "/sqlite3.h"), 0),
    }
    for name, (text, first) in texts.items():
        (out / name).write_bytes(cut(text, first))
        print(out / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
