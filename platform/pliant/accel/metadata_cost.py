"""What it takes to derive a packed row's metadata, measured on this machine."""

import statistics
import time

import torch

REPETITIONS = 20


def seconds_per_build(num_segments: int, seq_len: int, device: str | None = None) -> float:
    """Median seconds to derive from position ids what packed attention needs: where segments begin,
    how long the longest is, and which segment each token belongs to. One row of `seq_len` tokens in
    `num_segments` segments of like length; on the GPU where there is one."""
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    length = max(seq_len // num_segments, 1)
    positions_T = (torch.arange(seq_len) % length).to(where)
    seconds = []
    for _ in range(REPETITIONS):
        began = time.perf_counter()
        _build(positions_T)
        if where.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _build(positions_T: torch.Tensor) -> tuple[torch.Tensor, int, torch.Tensor]:
    starts = torch.nonzero(positions_T == 0).flatten()
    end = torch.tensor([len(positions_T)], device=positions_T.device)
    cumulative = torch.cat([starts, end]).to(torch.int32)
    longest = int((cumulative[1:] - cumulative[:-1]).max())
    return cumulative, longest, torch.cumsum((positions_T == 0).to(torch.int32), 0)
