#!/usr/bin/env python3
"""Makes tests/vectors/marks.json and marks.txt: a byte-level tokenizer without merges whose added tokens take
white space along or must stand alone, and texts with their token ids as the package tokenizers gives them.

Usage: mark_vectors.py tests/vectors     (needs the package tokenizers)
"""
import json
import random
import sys

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

WORDS = ["<l>", "<r>", "<lr>", "<w>", "<wl>", "<wr>", "<wlr>", "<p>", "or", " <s>", " ", "  ", "\n", "\t ", "a", "_", "9", ".",
         "\u00a0", "\u3000", "\u2028", "\u0085", "\u200b", "\u200d", "\u0301", "\u00e9", "\u4e16", "\u2160", "\u24b6", "\u00b2", "\U0001f600",
         "\u0e31", "\u203f", "-"]


def main(folder):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    t = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    for text in ["<l>", "<r>", "<lr>", "<w>", "<wl>", "<wr>", "<wlr>", "<p>", "or", " <s>"]:
        t.add_special_tokens([AddedToken(text, lstrip="l" in text, rstrip="r" in text and text != "or",
                                         single_word="w" in text or text == "or", normalized=False)])
    t.save(f"{folder}/marks.json", pretty=False)
    rng = random.Random(1)
    texts = ["", "<l>", "  <l>  ", "  <r>  ", " <lr> <lr> ", "a<w>a", "a <w> a", "<w><w>", "for", "f or", "or", "or.or",
             "<r> <s>", "<r>   <s>", "<r> <l>", "a<wlr> <wlr>b", "<w>_", "-<w>-"]
    texts += ["".join(rng.choice(WORDS) for _ in range(rng.randrange(2, 9))) for _ in range(600)]
    with open(f"{folder}/marks.txt", "w") as out:
        out.write("# Made by tools/mark_vectors.py; see there. T: the text as a JSON string; I: its ids.\n")
        for text in texts:
            ids = t.encode(text, add_special_tokens=False).ids
            out.write(f"T {json.dumps(text)}\nI {' '.join(map(str, ids))}\n")


main(sys.argv[1])
