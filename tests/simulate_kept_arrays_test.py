"""Arrays of several cores that one array stands for between kernels."""

import numpy as np
import pytest

import coremesh as cm
from coremesh.simulate import kept_arrays


def _of_cores(size, *firsts):
  return {(i,): np.arange(size) + first for i, first in enumerate(firsts)}


def test_arrays_that_differ_are_found_again():
  values = _of_cores(4, 0, 7)
  found = kept_arrays.find(kept_arrays.kept(values))
  assert found is not None
  for place, value in values.items():
    np.testing.assert_array_equal(found[place], value)


def test_arrays_that_are_equal_stand_for_themselves():
  kept = kept_arrays.kept(_of_cores(1, 3, 3))
  np.testing.assert_array_equal(kept, [3])
  assert kept_arrays.find(kept) is None


def test_arrays_that_differ_and_cannot_hold_a_mark_are_refused():
  with pytest.raises(cm.UnsupportedError, match="8 bytes on each core"):
    kept_arrays.kept(_of_cores(1, 3, 4))


def test_arrays_that_are_not_kept_any_more_are_an_error(monkeypatch):
  monkeypatch.setattr(kept_arrays, "_MAX_KEPT", 2)
  first, *_ = [kept_arrays.kept(_of_cores(4, i, i + 1)) for i in range(3)]
  with pytest.raises(cm.UnsupportedError, match="has let go"):
    kept_arrays.find(first)
