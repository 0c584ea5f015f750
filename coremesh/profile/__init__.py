"""The time of a compiled program, from its machine code and no TPU."""
