"""What JAX logs by itself, and how to keep it from doing so."""

from collections.abc import Iterator
import contextlib
import logging

_CALLBACKS = "jax._src.callback"


@contextlib.contextmanager
def quiet_callbacks() -> Iterator[None]:
  """Keeps JAX from logging what a callback raises: it is raised as well."""
  logger = logging.getLogger(_CALLBACKS)
  silence = lambda record: not record.exc_info
  logger.addFilter(silence)
  try:
    yield
  finally:
    logger.removeFilter(silence)
