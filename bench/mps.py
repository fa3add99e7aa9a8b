#!/usr/bin/env python3
"""Runs a command under NVIDIA's multi-process service, which begins and ends with it: mps.py COMMAND [ARGUMENT...].
Exit code: the command's; 77 where there is no nvidia-cuda-mps-control."""
import subprocess
import sys

import card


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    if not card.Mps.available():
        print("mps.py: nvidia-cuda-mps-control is not here", file=sys.stderr)
        return 77
    card.end_on_sigterm()
    with card.Mps() as mps:
        return subprocess.run(sys.argv[1:], env=mps.env).returncode


if __name__ == "__main__":
    sys.exit(main())
