"""The Triton/CUDA runner. Every file that computes has its NumPy twin at the same path in cpu_reference."""
