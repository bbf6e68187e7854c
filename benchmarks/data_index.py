"""Measures time and memory to build, store and map the shuffled index of a large corpus.

    python benchmarks/data_index.py

Each case runs in a process of its own, so that the kernel's high-water mark of one does not hide that of the next.
"""

import multiprocessing
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
from _history import Parser, record

from core.datasets.sample_index import build_indices, load_or_build

SEQUENCE_LENGTH = 1024
CASES = [(10**6, 1), (10**7, 1), (10**7, 4)]  # documents, epochs


def measure(num_documents: int, num_epochs: int) -> tuple[str, float]:
    """Returns a line of figures, and the time of a later start over that of the first."""
    lengths = np.random.default_rng(0).lognormal(5.5, 1.0, num_documents).astype(np.int32) + 1
    tokens = int(lengths.sum(dtype=np.int64))
    num_samples = (tokens * num_epochs - 1) // SEQUENCE_LENGTH
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    arrays = build_indices(lengths, 0, num_documents, SEQUENCE_LENGTH, num_samples, seed=1)
    build_s = time.perf_counter() - start
    peak_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    result_mib = sum(array.nbytes for array in arrays.values()) / 2**20
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        load_or_build(Path(folder), {}, lambda: arrays)
        store_s = time.perf_counter() - start
        start = time.perf_counter()
        load_or_build(Path(folder), {}, dict)
        load_s = time.perf_counter() - start
    line = (
        f"{num_documents:.0e} documents, {tokens:.1e} tokens, {num_epochs} epochs, {num_samples:,} samples: "
        f"build {build_s:.2f} s, peak {peak_mib:.0f} MiB for a result of {result_mib:.0f} MiB, "
        f"store {store_s:.2f} s, map and verify {load_s:.2f} s"
    )
    return line, load_s / (build_s + store_s)


if __name__ == "__main__":
    Parser(__doc__).parse_args()
    for case in CASES:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            line, ratio = pool.apply(measure, case)
        record(f"{case[0]:.0e} documents, {case[1]} epochs: a later start / the first", ratio)
        print(line, flush=True)
