"""What a simulated cluster costs: CPU seconds of a seed of the campaign."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from statistics import median

from proving.campaign import run_seed


def measure(rounds: int, seeds: int) -> list[float]:
    """Of the median seed, in a fresh process each round."""
    found: list[float] = []
    for _ in range(rounds):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            found.append(pool.submit(_cpu_s, seeds).result())
    return found


def _cpu_s(seeds: int) -> float:
    return median(run_seed(seed).cpu_s for seed in range(seeds))
