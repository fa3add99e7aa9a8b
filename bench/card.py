#!/usr/bin/env python3
"""What the scripts of bench/ share about a card: its memory as the driver's management library (NVML) accounts it,
sampled while something runs, and NVIDIA's multi-process service (MPS). Nothing here changes a setting of the card.

    card.py cuda:N COMMAND [ARGUMENT...]     runs it, and prints the most memory that was in use meanwhile"""
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

INSUFFICIENT = 7  # nvmlReturn_t: the list is longer than the room for it
MIB = 1 << 20


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _Process(ctypes.Structure):  # nvmlProcessInfo_t of the _v3 calls
    _fields_ = [("pid", ctypes.c_uint), ("bytes", ctypes.c_ulonglong), ("instance", ctypes.c_uint),
                ("compute_instance", ctypes.c_uint)]


class Card:
    """One card by its number. Raises OSError where there is no NVML or no such card."""

    LISTS = ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetMPSComputeRunningProcesses_v3")

    def __init__(self, number=0):
        self.library = ctypes.CDLL(os.environ.get("NVML_LIBRARY", "libnvidia-ml.so.1"))
        self.handle = ctypes.c_void_p()
        if self.library.nvmlInit_v2() or self.library.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(self.handle)):
            raise OSError(f"NVML: no card {number}")

    def used(self):
        """Bytes in use on the card, whoever uses them."""
        memory = _Memory()
        if self.library.nvmlDeviceGetMemoryInfo(self.handle, ctypes.byref(memory)):
            raise OSError("NVML: memory of the card is not told")
        return memory.used

    def processes(self):
        """Bytes by pid; empty where the driver does not tell (in a container of its own, say)."""
        found = {}
        for name in self.LISTS:
            count = ctypes.c_uint(64)
            while True:
                rows = (_Process * count.value)()
                status = getattr(self.library, name)(self.handle, ctypes.byref(count), rows)
                if status != INSUFFICIENT:
                    break
                count.value += 16
            for row in rows[:count.value] if status == 0 else []:
                if row.bytes != 2**64 - 1:  # not available
                    found[row.pid] = max(row.bytes, found.get(row.pid, 0))
        return found


def open_card(device):
    """The card of "cuda:N" (no CUDA_VISIBLE_DEVICES), or None where there is no NVML."""
    try:
        return Card(int(device.partition(":")[2] or 0))
    except OSError:
        return None


def end_on_sigterm():
    """So that `timeout` ends what was begun: children and the multi-process service."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def process_name(pid):
    try:
        with open(f"/proc/{pid}/comm") as f:
            return f.read().strip()
    except OSError:
        return "?"


class Watch:
    """Samples a card from `with` to its end. `most`: the largest bytes in use above what was before; `by_name`: the
    largest of each program's name; `by_pid`; `samples`: how many."""

    def __init__(self, card, seconds=0.02):
        self.card, self.seconds = card, seconds
        self.most = self.samples = 0
        self.by_name, self.by_pid, self._names = {}, {}, {}

    def __enter__(self):
        self.before, self._end = self.card.used(), threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def _run(self):
        while not self._end.wait(self.seconds):
            self.most = max(self.most, self.card.used() - self.before)
            for pid, used in self.card.processes().items():
                self.by_pid[pid] = max(used, self.by_pid.get(pid, 0))
                name = self._names.get(pid)
                if name in (None, "?", "specontext"):  # a program's name comes with its exec
                    name = self._names[pid] = process_name(pid)
                self.by_name[name] = max(used, self.by_name.get(name, 0))
            self.samples += 1

    def __exit__(self, *_):
        self._end.set()
        self._thread.join()


def wait_level(card, level, seconds=10, slack=MIB):
    """Until no more than `level` bytes are in use. The bytes in use at last."""
    end = time.monotonic() + seconds
    while (used := card.used()) > level + slack and time.monotonic() < end:
        time.sleep(0.05)
    return used


class Mps:
    """The multi-process service from `with` to its end, with pipes of its own; environment: `env`. `available()` says
    whether it can be started here."""

    @staticmethod
    def available():
        return shutil.which("nvidia-cuda-mps-control") is not None

    def __enter__(self):
        self.folder = tempfile.mkdtemp(prefix="mps-")
        self.env = dict(os.environ, CUDA_MPS_PIPE_DIRECTORY=self.folder, CUDA_MPS_LOG_DIRECTORY=self.folder)
        try:
            subprocess.run(["nvidia-cuda-mps-control", "-d"], env=self.env, check=True, timeout=20)
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        return self

    def log(self):
        """The last lines of the server's log."""
        try:
            with open(os.path.join(self.folder, "server.log")) as f:
                return f.read().splitlines()[-5:]
        except OSError:
            return []

    def __exit__(self, *_):
        try:
            with open(os.path.join(self.folder, "nvidia-cuda-mps-control.pid")) as f:
                pid = int(f.read())
        except (OSError, ValueError):
            pid = 0
        try:
            subprocess.run(["nvidia-cuda-mps-control"], input="quit -t 5\n", text=True, env=self.env, timeout=20,
                           stdout=subprocess.DEVNULL)
        except (subprocess.SubprocessError, OSError):
            pass
        end = time.monotonic() + 10
        while pid and process_name(pid).startswith("nvidia-cuda-mps") and time.monotonic() < end:
            time.sleep(0.05)
        if pid and process_name(pid).startswith("nvidia-cuda-mps"):
            os.kill(pid, 9)
        shutil.rmtree(self.folder, ignore_errors=True)


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    end_on_sigterm()
    device = open_card(sys.argv[1])
    if not device:
        print("no NVML here: memory of the card is not watched")
        return subprocess.run(sys.argv[2:]).returncode
    with Watch(device) as watch:
        code = subprocess.run(sys.argv[2:]).returncode
    parts = ", ".join(f"{name} {used / MIB:.0f}" for name, used in sorted(watch.by_name.items()))
    print(f"memory of the card: the most in use {watch.most / MIB:.0f} MiB ({parts}), before {watch.before / MIB:.0f}")
    return code


if __name__ == "__main__":
    sys.exit(main())
