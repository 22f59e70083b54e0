"""Kernels for CUDA devices, in Triton. Imported only where they are chosen: Triton is no dependency of this package."""
