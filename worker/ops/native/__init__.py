"""Our C++, compiled when the package is installed and loaded through a plain C interface."""
