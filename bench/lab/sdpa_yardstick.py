"""The yardstick of prefill attention: torch's scaled_dot_product_attention, causal, 32 query and 8 KV heads
of 128, by backend; median of events. Run where a GPU and torch are."""
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


def median_ms(run, runs=9):
    times = []
    for _ in range(runs + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times[2:])[runs // 2]


def main():
    for batch, tokens in ((1, 8192), (4, 2048), (1, 32768)):
        q = torch.randn(batch, 32, tokens, 128, device="cuda", dtype=torch.bfloat16)
        k = torch.randn(batch, 8, tokens, 128, device="cuda", dtype=torch.bfloat16)
        v = torch.randn_like(k)
        flop = 4 * 128 * 32 * batch * tokens * (tokens + 1) / 2
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            with sdpa_kernel(backend):
                try:
                    ms = median_ms(lambda: torch.nn.functional.scaled_dot_product_attention(
                        q, k, v, is_causal=True, enable_gqa=True))
                except RuntimeError as error:
                    print(f"{backend.name} {batch} x {tokens}: {str(error).splitlines()[0]}")
                    continue
            print(f"{backend.name} {batch} x {tokens}: {ms:.3f} ms, {flop / ms / 1e9:.0f} TFLOP/s")


if __name__ == "__main__":
    main()
