#!/usr/bin/env bash
# Puts the programs and the shared libraries that a bare machine lacks into one folder, found relative to the
# programs (rpath $ORIGIN/../lib), so that it runs on a machine of the same processor family that has glibc, and for
# --device cuda a driver and CUDA's cuBLASLt.
#
#   mk/bundle.sh OUT [PROGRAM...]     programs beyond build/bin's go to OUT/tests
set -eu
out=$1
shift
rm -rf "$out"
heads=$out/share/specontext/heads
mkdir -p "$out/bin" "$out/lib" "$out/tests" "$heads/alternatives"
cp build/bin/specontext build/bin/specontext-* "$out/bin"
[ ! -e build/bin/libspecontext-cuda.so ] || cp build/bin/libspecontext-cuda.so "$out/bin"
cp heads/*.safetensors "$heads"
cp heads/alternatives/*.safetensors "$heads/alternatives"
[ $# -eq 0 ] || cp "$@" "$out/tests"
find "$out/bin" "$out/tests" -type f -exec strip --strip-debug {} +
# What every machine with glibc has, and what belongs to the driver and to CUDA, stays out.
find "$out/bin" "$out/tests" -type f -exec ldd {} + 2>/dev/null | awk '$2 == "=>" && $3 ~ /^\// { print $3 }' | sort -u |
    grep -vE '/(libc|libm|libdl|librt|libpthread|libresolv|ld-linux-x86-64)\.so|/libcu[A-Za-z]+\.so|/libnv' |
    xargs -r cp -L -t "$out/lib"
rmdir "$out/tests" 2>/dev/null || true
size=$(du -sm "$out" | cut -f1)
echo "$out: $size MiB"
[ "$size" -lt 48 ] || { echo "$out: found $size MiB, expected under 48" >&2; exit 1; }
