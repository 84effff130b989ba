"""Layers: Flax NNX modules over the ops of `pallas_kernels`."""
