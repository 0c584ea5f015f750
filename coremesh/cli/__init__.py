"""The command `coremesh`: one module for each of its commands."""
