"""Benchmarks of whole systems; kernels have `python -m pallas_kernels.bench`."""
