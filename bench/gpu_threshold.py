#!/usr/bin/env python3
"""KV memory with which one more run of layers leaves a card at a wanted length of the requests.

    gpu_threshold.py LENGTH CONTEXT CAP SPECONTEXT plan OPTION...     (the options without memory and -c)

Asks `plan` what CAP leaves for the KV cache, and halves the way to the largest part of it whose threshold, the next one
above LENGTH, comes to LENGTH. Prints bytes, that threshold, how many layers are offloaded below it, and how many host
memory has: with --write-through offloaded among the options those alone that may leave, the threshold's run with them."""
import json
import subprocess
import sys

MIB = 1 << 20


def main():
    length, context, cap, command = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:]

    def plan(*memory):
        done = subprocess.run([*command, "-c", context, "--context", str(length), "--json", *memory], stdout=subprocess.PIPE)
        if done.returncode:
            sys.exit("plan failed")
        return json.loads(done.stdout)

    def thresholds(size):
        return {row["layers_offloaded"]: row["context"] for row in plan("--device-memory", str(size))["thresholds"]}

    whole = plan("--gpu-memory", cap)
    least, most, layers = 0, whole["gpu"]["kv_bytes"] // MIB, whole["layers"]
    full = thresholds(most * MIB)
    offloaded = min((n for n, longest in full.items() if longest >= length), default=None)
    if offloaded is None or offloaded == layers:
        sys.exit(f"CAP={cap}: found no threshold above {length} tokens: {full}")
    while least < most:
        middle = (least + most + 1) // 2
        if thresholds(middle * MIB)[offloaded] <= length:
            least = middle
        else:
            most = middle - 1
    host = plan("--device-memory", str(least * MIB))["host_layers"]
    if host <= offloaded:
        sys.exit(f"{least} MiB: more than {offloaded} layers never leave: found {host} in host memory")
    print(least * MIB, thresholds(least * MIB)[offloaded], offloaded, host)


if __name__ == "__main__":
    main()
