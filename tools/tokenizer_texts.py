#!/usr/bin/env python3
"""Mixed real text for tools/tokenizer_compare.py, out of Debian packages, one file a kind:

    prose.txt     the tutor of vim-runtime in its languages
    names.txt     names of countries from iso-codes in all translations: more than twenty scripts
    emoji.txt     emoji-test.txt of unicode-data: every sequence, with joiners, skin tones and flags
    code.txt      C headers of libc6-dev and Python sources of libpython3-stdlib's minimal part
    space.txt     the lines of the above with their spaces made odd, by a seeded generator

    python3 tools/tokenizer_texts.py --out build/tokenizer

The packages stay in OUT, so that a second call downloads nothing. Only the standard library, apt-get and dpkg-deb are
needed.
"""
import argparse
import gettext
import pathlib
import random
import subprocess
import sys

PACKAGES = ["vim-runtime", "iso-codes", "unicode-data", "libc6-dev", "libpython3.11-minimal"]
SPACES = [" ", "  ", "   ", "\t", "\t\t ", " \t", "\u00a0", "\u3000", "\u2009", "\u200b", "\r", " \u2028", "\x0b", "\x0c"]


def unpack(out, name):
    """The package's files, in a folder; downloaded when they are not there."""
    to = out / "packages" / name
    if not to.exists():
        if not list(out.glob(f"{name}_*.deb")):
            subprocess.run(["apt-get", "download", "-qq", name], cwd=out, check=True)
        to.mkdir(parents=True)
        subprocess.run(["dpkg-deb", "-x", str(sorted(out.glob(f"{name}_*.deb"))[-1]), str(to)], check=True)
    return to


def lines_of(paths):
    for path in sorted(paths):
        try:
            text = path.read_bytes().decode()
        except UnicodeDecodeError:
            continue
        yield from (l for l in text.split("\n") if l)


def names(root):
    for path in sorted(root.rglob("iso_3166-1.mo")):
        with open(path, "rb") as f:
            catalog = gettext.GNUTranslations(f)._catalog
        yield from (v for k, v in sorted(catalog.items(), key=str) if k and isinstance(v, str) and v and "\n" not in v)


def odd(lines, rng):
    for line in lines:
        words = line.split(" ")
        yield "".join(w + (rng.choice(SPACES) * rng.choice([1, 1, 2, 7]) if rng.random() < 0.5 else " ") for w in words)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=pathlib.Path)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    roots = {name: unpack(out, name) for name in PACKAGES}
    texts = {
        "prose.txt": list(lines_of(roots["vim-runtime"].rglob("tutor.*utf-8"))),
        "names.txt": list(names(roots["iso-codes"])),
        "emoji.txt": list(lines_of(roots["unicode-data"].rglob("emoji-test.txt"))),
        "code.txt": list(lines_of(roots["libc6-dev"].rglob("*.h")))[:40000] +
                    list(lines_of(roots["libpython3.11-minimal"].rglob("*.py")))[:20000],
    }
    rng = random.Random(1)
    everything = [line for lines in texts.values() for line in lines]
    texts["space.txt"] = [l for l in odd(rng.sample(everything, 10000), rng) if "\n" not in l]
    for name, lines in texts.items():
        (out / name).write_bytes("\n".join(lines).encode() + b"\n")
        print(f"{name}: {len(lines)} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main())
