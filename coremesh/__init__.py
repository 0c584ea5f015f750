"""Kernels for every core of a TPU, trusted before touching one.

The public names are listed in `__init__.pyi` and loaded when first used, so
that importing coremesh costs and changes nothing.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
