#!/usr/bin/env python3
"""Makes tests/vectors/tokenizer_smollm2.txt: texts and their token ids as two other implementations give them.

Usage: tokenizer_vectors.py MODEL.gguf > tests/vectors/tokenizer_smollm2.txt
Needs the packages gguf, tokenizers and llama-cpp-python. The ids come from `tokenizers`, with the vocabulary,
merges and pre-tokenizer of the model's own tokenizer.json rebuilt from the GGUF file; llama.cpp must agree, or
the text is reported on stderr and marked "differs" in the file.
"""
import json
import sys

from gguf import GGUFReader
from llama_cpp import Llama
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

TEXTS = [
    "", " ", "  ", "\n", "\n\n\n", "\t", " \t \n \r\n ", "a", " a", "a ", "  a  b   c    ",
    "Hello, world!", "Hello World", "HELLO WORLD", "The quick brown fox jumps over the lazy dog.",
    "it's I'm you're we've he'll she'd they've don't", "IT'S I'M YOU'RE WE'VE HE'LL", "it\u2019s 'tis 'sss 't",
    "0 1 23 456 7890 12345678901234567890", "3.14159 1,000,000 1e-5 0xdeadbeef 2^64", "x1y2z3 a1 b22", "  5", " \t7",
    "Price: $12.50 (50% off!) #1 @home & co.", "!!!???...;;;:::---___===+++", "((([[[{{{<<<>>>}}}]]])))", "\"'`\u201c\u201d\u2018\u2019",
    "int main(void)\n{\n    printf(\"hello\\n\");\n\treturn 0;\n}\n",
    "def f(x):\n    return [i**2 for i in range(x) if i % 2]\n\n\nclass A(B): pass",
    "#include <stdio.h>\n#define MAX(a,b) ((a)>(b)?(a):(b))\n/* comment */ // more",
    "SELECT * FROM t WHERE id='1' AND name LIKE '%x%';", "<html><body class=\"a\">&nbsp;</body></html>",
    "{\"key\": [1, 2.5, null, true], \"nested\": {\"a\": \"b\"}}", "https://example.org/path?q=1&r=%20#frag",
    "user@example.com +49 (0)30 123456", "snake_case camelCase PascalCase kebab-case SCREAMING_CASE",
    "\u00e9\u00e8\u00ea\u00eb \u00fc\u00f6\u00e4\u00df \u00f1 \u00e7 \u00f8 \u00e5 \u0142 \u017e", "e\u0301 n\u0303 u\u0308 combining", "\u017f \u1e9e \u0130 \u0131",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440! \u041a\u0430\u043a \u0434\u0435\u043b\u0430?", "\u0393\u03b5\u03b9\u03ac \u03c3\u03bf\u03c5 \u039a\u03cc\u03c3\u03bc\u03b5", "\u4f60\u597d\uff0c\u4e16\u754c\uff01\u8fd9\u662f\u4e00\u4e2a\u6d4b\u8bd5\u3002",
    "\u3053\u3093\u306b\u3061\u306f\u4e16\u754c\u3002\u30ab\u30bf\u30ab\u30ca\u3068\u6f22\u5b57", "\uc548\ub155\ud558\uc138\uc694 \uc138\uacc4", "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645 \u0661\u0662\u0663", "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0926\u0941\u0928\u093f\u092f\u093e \u0967\u0968\u0969", "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35\u0e0a\u0e32\u0e27\u0e42\u0e25\u0e01", "\u10d2\u10d0\u10db\u10d0\u10e0\u10ef\u10dd\u10d1\u10d0", "\u1218\u120d\u12ab\u121d",
    "\U0001f600\U0001f680\U0001f44d\U0001f3fd \U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f1e9\U0001f1ea \u2764\ufe0f", "\U0001d400\U0001d401\U0001d7d8 \u2160\u2163 \u00bd \u00b2 \u2460",
    "\u2200x\u2208\u211d: x\u00b2 \u2265 0 \u21d2 \u222b f(x) dx \u2248 \u221e", "\u00a0nbsp\u00a0\u00a0two\u2003em\u3000wide\u2028line\u2029para\u0085nel",
    "zero\u200bwidth\ufeffbom\u180evowel\u2060joiner", "tab\tsep\tvalues\n1\t2\t3", "line one\r\nline two\r\n\r\nline four", "trailing spaces   \n   leading spaces",
    "\u0000nul\u0000", "\u0001\u0002\u0003\u001b[31mred\u001b[0m\u007f", "rare bytes \u0004\u0006##\u0004## \u0013\u0014\u0016\u001d end", "\U00050000 plane five \U000f0000 private \U0010ffff last",
    "<|endoftext|>", "<|im_start|>system\nYou obey.<|im_end|>\n<|im_start|>user\n", "a<|im_end|>b <|im_end|> c", "<|im_start|", "<<|im_start|>>",
    "<repo_name>x<file_sep>y<jupyter_code>1+1<empty_output>", "<|IM_START|> < |im_start|> <|im_start |>", "<|im_start|><|im_start|>   <|im_end|>  5",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    " " * 100 + "x" + "\n" * 50, "=" * 130, "ab" * 60 + "\u00e9" * 40, "Donaudampfschifffahrtselektrizit\u00e4tenhauptbetriebswerkbauunterbeamtengesellschaft",
    "pneumonoultramicroscopicsilicovolcanoconiosis antidisestablishmentarianism", "QmFzZTY0IGVuY29kZWQgdGV4dCB3aXRoIHBhZGRpbmc=", "\\n \\t \\u00e9 \\x00 \\\\",
    "Once upon a time, there was a little girl named Lily. She liked to play in the park.",
    "1. First\n2. Second\n   - nested\n   * other\n\n> quote\n\n```c\ncode\n```\n", "| a | b |\n|---|---|\n| 1 | 2 |",
]


def byte_alphabet():
    """Byte -> character of GPT-2's alphabet, to check that the vocabulary is what we think."""
    shown = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174]
    hidden = [b for b in range(256) if b not in shown]
    return {**{b: chr(b) for b in shown}, **{b: chr(256 + i) for i, b in enumerate(hidden)}}


def build(tokens, types, merges, with_marks):
    alphabet = set(byte_alphabet().values())
    plain = {t: i for i, t in enumerate(tokens) if types[i] == 1 and set(t) <= alphabet}
    marks = [t for i, t in enumerate(tokens) if types[i] == 3]
    vocab = dict(plain)
    vocab.update({t: i for i, t in enumerate(tokens) if types[i] == 3})
    tok = Tokenizer(models.BPE(vocab=vocab, merges=[tuple(m.split(" ")) for m in merges]))
    tok.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                                 pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tok.decoder = decoders.ByteLevel()
    if with_marks:
        tok.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in marks])
    return tok


def main(path):
    fields = GGUFReader(path).fields
    assert fields["tokenizer.ggml.pre"].contents() == "smollm"
    tokens, types, merges = (fields["tokenizer.ggml." + k].contents() for k in ("tokens", "token_type", "merges"))
    hf = [build(tokens, types, merges, m) for m in (False, True)]
    llama = Llama(path, vocab_only=True, verbose=False)
    print("# Token ids of SmolLM2-135M-Instruct, made by tools/tokenizer_vectors.py; see there.")
    print("# T: the text as a JSON string; P: ids with special parsing off; S: ids with it on.")
    agree = 0
    for text in TEXTS:
        print("T " + json.dumps(text))
        for special, letter in enumerate("PS"):
            ids = hf[special].encode(text, add_special_tokens=False).ids
            other = llama.tokenize(text.encode(), add_bos=False, special=bool(special)) if text else []
            agree += ids == other
            if ids != other:
                print(f"differs: {text!r} {letter} tokenizers {ids} llama.cpp {other}", file=sys.stderr)
                print("# differs: llama.cpp gives " + " ".join(map(str, other)))
            print(letter + " " + " ".join(map(str, ids)))
    print(f"{len(TEXTS)} texts, {agree} of {2 * len(TEXTS)} encodings agree", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1])
