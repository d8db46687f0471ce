"""Our Triton kernels, run on GPUs and, in tests, by the interpreter on a CPU."""
