#!/usr/bin/env python3
"""Makes tests/vectors/chat.json: chats and the prompts that models' own templates render for them.

Usage: chat_vectors.py NAME=TEMPLATE... > tests/vectors/chat.json
NAME is a format of model/chat.h; TEMPLATE a tokenizer_config.json, or a file with the template. Needs jinja2.
"""
import json
import sys

from jinja2 import Environment

CHATS = [
    [("user", "Hello")],
    [("system", "Be brief."), ("user", "  padded \n")],
    [("user", "1+1?"), ("assistant", "<think>\nadd\n</think>\n\n2"), ("user", "and 2+2?")],
    [("system", "S"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "e")],
    [("user", "\u4f60\u597d \U0001f600"), ("assistant", ""), ("user", "")],
    [("user", "weather?"), ("assistant", "let me see"), ("tool", "rain"), ("tool", "wind")],
    [("user", "q"), ("assistant", "<think>\nt1\n</think>\n\nx"), ("tool", "r"), ("assistant", "<think>t2</think>y")],
]


def main(args):
    vectors = []
    for arg in args:
        name, path = arg.split("=", 1)
        text = open(path, encoding="utf-8").read()
        bos = ""
        if path.endswith(".json"):
            config = json.loads(text)
            text, bos = config["chat_template"], config["bos_token"] or ""
        template = Environment(trim_blocks=True, lstrip_blocks=True).from_string(text)
        for chat in CHATS:
            messages = [{"role": r, "content": c} for r, c in chat]
            if name in ("deepseek-r1",) and any(r == "tool" for r, _ in chat):
                continue
            for generate in (False, True):
                prompt = template.render(messages=messages, add_generation_prompt=generate, bos_token=bos)
                if name == "llama3" and not generate:
                    continue  # its first template opens the answer always
                vectors.append({"format": name, "messages": messages, "generate": generate, "prompt": prompt})
    print(json.dumps(vectors, indent=0))


if __name__ == "__main__":
    main(sys.argv[1:])
