"""C++ kernels for CPU, compiled on first use and called through the FFI of XLA."""
