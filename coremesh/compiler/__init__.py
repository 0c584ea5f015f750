"""The TPU compiler, offline: what it makes of a program."""
