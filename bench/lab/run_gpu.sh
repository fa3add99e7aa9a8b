#!/bin/sh
# Everything that needs a GPU, in one go: tests, bench, yardstick, memory checker. Run in a checkout with
# build/cuda made (`make -f mk/cuda.mk`) or copied here. Logs go to $OUT or build/cuda/out.
#
# usage: run_gpu.sh [test] [bench [NAME ...]] [sdpa] [memcheck]     (nothing named: all)
out=${OUT:-build/cuda/out}
mkdir -p "$out"
wheels='import glob, nvidia; print(" ".join(glob.glob(list(nvidia.__path__)[0] + "/*/lib")))'
for lib in /usr/local/cuda/lib64 $(python3 -c "$wheels" 2>/dev/null); do
    [ -e "$lib/libcublasLt.so.13" ] && LD_LIBRARY_PATH=$lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
done
export LD_LIBRARY_PATH
[ $# -eq 0 ] && set -- test sdpa memcheck bench
status=0
while [ $# -gt 0 ]; do
    what=$1
    shift
    case $what in
    test) timeout 150 build/cuda/test_cuda 2>&1 | tee "$out/test.log" ;;
    sdpa) timeout 60 python3 bench/lab/sdpa_yardstick.py 2>&1 | tee "$out/sdpa.log" ;;
    memcheck)
        timeout 150 compute-sanitizer --tool memcheck --error-exitcode 9 build/cuda/test_cuda --small \
            >"$out/memcheck.log" 2>&1 || status=1
        tail -25 "$out/memcheck.log" ;;
    bench)
        timeout 200 build/cuda/bench_cuda "$@" 2>&1 | tee "$out/bench.log"
        set -- ;;
    *) echo "unknown: $what"; status=2 ;;
    esac
done
exit $status
