"""Fast kernels behind one interface each, with an executable reference beside them."""
