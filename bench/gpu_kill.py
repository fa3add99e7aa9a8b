#!/usr/bin/env python3
"""Deaths and faults on a GPU, with the parts taking turns on the card and under MPS.

    gpu_kill.py BIN_FOLDER MODEL HEAD [--check build/bundle/tests/check_kill] [--kills 21] [--runs 6] [--device cuda:0]

1. CHECK (tests/gpu/check/check_kill.c): daemons killed in turn while they work and started again; memory of the card and
   descriptors of those that survive return to their level.
2. `specontext run`, a part of which is killed: all end, with one line and exit code 1, and the card holds what it held.
3. Another program that makes an illegal access on the card while `run` decodes: time-sliced it goes on, under MPS all
   clients of the server fail; how it ends, and whether the next run works at once.
Exit code 1: something was not as wanted."""
import argparse
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time

import card

PARTS = ("specontext-kvstore", "specontext-retriever", "specontext-decoder")
BOUND = 8  # seconds from a death to the end of all

FAULT = b""".version 7.0
.target sm_80
.address_size 64
.visible .entry fault()
{
    .reg .b64 %at;
    .reg .b32 %one;
    mov.u64 %at, 16;
    mov.u32 %one, 1;
    st.global.u32 [%at], %one;
    ret;
}
\0"""


def fault(number):
    """Makes an illegal access; what the driver answers (700 is CUDA_ERROR_ILLEGAL_ADDRESS)."""
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context, module, function = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    none = ctypes.c_void_p()
    for status in (cuda.cuInit(0), cuda.cuDeviceGet(ctypes.byref(device), number),
                   cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), cuda.cuCtxSetCurrent(context),
                   cuda.cuModuleLoadData(ctypes.byref(module), FAULT),
                   cuda.cuModuleGetFunction(ctypes.byref(function), module, b"fault"),
                   cuda.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, none, none, none)):
        if status:
            sys.exit(f"the program that faults: CUDA error {status} before it could")
    return cuda.cuCtxSynchronize()


def options():
    a = argparse.ArgumentParser(description="Deaths and faults on a GPU.")
    a.add_argument("bin")
    a.add_argument("model")
    a.add_argument("head")
    a.add_argument("--check")
    a.add_argument("--kills", default="21")
    a.add_argument("--runs", type=int, default=6)
    a.add_argument("--device", default="cuda:0")
    return a.parse_args()


class Run:
    """A long `specontext run` that has begun to write."""

    def __init__(self, o, env):
        self.folder = tempfile.TemporaryDirectory()
        self.env = dict(env, TMPDIR=self.folder.name, XDG_RUNTIME_DIR=self.folder.name)
        command = [os.path.join(o.bin, "specontext"), "run", "-m", o.model, "-H", o.head, "-p", "Once upon a time", "-n",
                   "8000", "--ignore-eos", "--budget", "256", "--offload-layers", "8", "--device", o.device]
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(command, env=self.env, stdout=subprocess.PIPE, stderr=self.errors, bufsize=0)
        self.began = bool(self.process.stdout.read(1))

    def more(self, seconds):
        """Whether it writes on for so long."""
        end, wrote = time.monotonic() + seconds, True
        while wrote and time.monotonic() < end:
            wrote = bool(self.process.stdout.read(1))
        return wrote

    def part(self, name):
        """The pid of a part of it, or 0."""
        for entry in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{entry}/stat") as f:
                    stat = f.read()
            except OSError:
                continue
            comm, rest = stat[stat.index("(") + 1:stat.rindex(")")], stat[stat.rindex(")") + 2:].split()
            if comm == name[:15] and int(rest[1]) == self.process.pid:
                return int(entry)
        return 0

    def end(self):
        """Exit code (None: it did not end in time), seconds, last line."""
        begin = time.monotonic()
        try:
            self.process.communicate(timeout=BOUND)
            code = self.process.returncode
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            code = None
        took = time.monotonic() - begin
        self.errors.seek(0)
        lines = self.errors.read().strip().splitlines() or ["no word"]
        self.errors.close()
        self.folder.cleanup()
        return code, took, lines[-1]


def kill_runs(o, env, name, device):
    failed = 0
    for i in range(o.runs):
        part = PARTS[i % 3]
        before = device.used() if device else 0
        run = Run(o, env)
        pid = run.part(part)
        if pid:
            os.kill(pid, signal.SIGKILL)
        code, took, line = run.end()
        # The first run of a server leaves the server's own memory behind.
        left = card.wait_level(device, before) - before if device else 0
        first = i == 0 and name == "MPS"
        good = pid and code == 1 and "signal 9" in line and (first or left <= card.MIB)
        failed += not good
        print(f"{name}: run, {part} killed: exit code {code} after {took:.1f} s, {left / card.MIB:.0f} MiB more in use than "
              f"before{' (the server of MPS began)' if first else ''}: {line}: {'ok' if good else 'FAILED'}", flush=True)
    return failed


def fault_beside(o, env, name):
    number = o.device.partition(":")[2] or "0"
    run = Run(o, env)
    other = subprocess.run([sys.executable, __file__, "--fault", number], env=env, capture_output=True, text=True, timeout=60)
    said = ((other.stdout + other.stderr).strip().splitlines() or ["no word"])[-1]
    faulted = said.startswith("CUDA error 7")
    if name == "time-sliced":
        good = faulted and run.began and run.more(2)
        run.process.send_signal(signal.SIGINT)
        code, took, line = run.end()
        print(f"{name}: another program faults ({said}): run {'goes on' if code == 130 else 'has ended: ' + line}: "
              f"{'ok' if good and code == 130 else 'FAILED'}")
        return not (good and code == 130)
    code, took, line = run.end()
    print(f"{name}: another program faults ({said}): run ends with exit code {code} after {took:.1f} s: {line}")
    begin = time.monotonic()
    after = Run(o, env)
    ready = time.monotonic() - begin
    good = after.began and after.more(1)
    after.process.send_signal(signal.SIGINT)
    again, _, line = after.end()
    good = faulted and good and code == 1 and again == 130
    print(f"{name}: the next run begins after {ready:.1f} s and ends with exit code {again}: {'ok' if good else 'FAILED: ' + line}")
    return not good


def round_of(o, env, name):
    device, failed = card.open_card(o.device), 0
    if o.check:  # which lies elsewhere than the programs, and looks for the library beside itself
        library = os.path.abspath(os.path.join(o.bin, "libspecontext-cuda.so"))
        done = subprocess.run([o.check, o.model, o.head, "--kills", o.kills, "--device", o.device], text=True,
                              env={"SPECONTEXT_GPU_LIBRARY": library, **env},
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for line in done.stdout.strip().splitlines():
            print(f"{name}: {line}", flush=True)
        failed += done.returncode != 0
    failed += kill_runs(o, env, name, device)
    return failed + fault_beside(o, env, name)


def main():
    if sys.argv[1:2] == ["--fault"]:
        print(f"CUDA error {fault(int(sys.argv[2]))}")
        return 0
    o = options()
    card.end_on_sigterm()
    failed = round_of(o, dict(os.environ), "time-sliced")
    if card.Mps.available():
        with card.Mps() as mps:
            failed += round_of(o, mps.env, "MPS")
            for line in mps.log():
                print(f"MPS: server: {line}")
    else:
        print("MPS: nvidia-cuda-mps-control is not here; left out")
    print(f"{'FAILED' if failed else 'ok'}, {failed} failures")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
