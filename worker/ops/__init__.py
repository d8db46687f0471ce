"""The dozen operations that model code calls, and the sets of kernels behind them."""
