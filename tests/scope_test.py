"""Tests for coremesh.scope."""

import dataclasses

import numpy as np
import pytest

from coremesh import scope
from coremesh.errors import CollectiveError

_RING = ("ring_shift", ("device", "core"), 1)
_BACK = ("ring_shift", ("device", "core"), 7)
_ALL = ("barrier", ("device", "core"))
_LINE = ("neighbours", ("device",), "line")


_LINKS = (("send 0", "receive 0"), ("send 1", "receive 1"))


def _scope(**kwargs):
  values = dict(name="k", core_axes=("core",), links=_LINKS, num_links=2)
  return scope.KernelScope(**values | kwargs)


# --- the current scope -----------------------------------------------------


def test_a_scope_is_current_inside_it_and_only_there():
  outer, inner = _scope(), _scope()
  assert scope.current() is None
  with scope.entered(outer) as entered:
    assert entered is scope.current() is outer
    with scope.entered(inner):
      assert scope.current() is inner
    assert scope.current() is outer
  assert scope.current() is None


def test_an_error_inside_leaves_the_scope():
  with pytest.raises(KeyError), scope.entered(_scope()):
    raise KeyError
  assert scope.current() is None


def test_a_trial_scope_changes_nothing_of_the_real_one():
  real, sem = _scope(), object()
  trial = dataclasses.replace(real)
  trial.take_link(_RING)
  trial.claim_barrier_semaphore(_ALL)
  trial.claim_semaphore(sem, _ALL)
  trial.meet(["x"])
  trial.reach("put", ["core"])
  assert real == _scope()


# --- links -----------------------------------------------------------------


def test_each_copy_takes_a_link_of_its_own():
  here = _scope()
  assert [here.take_link(), here.take_link()] == list(_LINKS)


def test_copies_that_take_turns_share_a_link():
  here = _scope()
  first = here.take_link(_RING)
  assert here.take_link(_BACK) != first
  for _ in range(5):
    assert here.take_link(_RING) == first


@pytest.mark.parametrize("pattern", [None, _BACK])
def test_a_link_too_many_says_how_many_are_needed(pattern):
  here = _scope()
  here.take_link(_RING)
  here.take_link()
  here.take_link(_RING)
  with pytest.raises(CollectiveError) as caught:
    here.take_link(pattern)
  for words in (
    "Kernel 'k' makes more than num_links=2 copies",
    "cm.kernel(..., num_links=3) or more",
    "send_sem= and recv_sem=",
  ):
    assert words in str(caught.value)


def test_what_no_helper_has_taken_can_be_left_out():
  here = _scope(copy_sem="copy", neighbour_sem="neighbour")
  assert here.semaphores == ["copy", "neighbour", *_LINKS[0], *_LINKS[1]]
  here.take_link(_RING)
  here.take_link(_RING)
  assert here.semaphores == ["copy", "neighbour", *_LINKS[1]]
  assert _scope(links=()).semaphores == []


# --- one pattern a semaphore -----------------------------------------------


def test_one_pattern_may_use_the_barrier_semaphore_any_number_of_times():
  here = _scope()
  for _ in range(3):
    here.claim_barrier_semaphore(_RING)
  assert here.barrier_pattern == _RING


def test_two_patterns_on_the_barrier_semaphore_are_refused():
  here = _scope()
  here.claim_barrier_semaphore(_ALL)
  with pytest.raises(CollectiveError) as caught:
    here.claim_barrier_semaphore(_LINE)
  for words in (
    "Kernel 'k' uses its one barrier semaphore",
    "for barrier over ('device', 'core') and for neighbours over ('device',",
    "A fast worker's signal for the second would be counted in the first.",
    "Open the kernel with the wider one",
    "sem=, a pltpu.SemaphoreType.REGULAR scratch",
  ):
    assert words in str(caught.value)
  assert here.barrier_pattern == _ALL


def test_two_patterns_on_one_given_semaphore_are_refused():
  # Told by identity: refs compare elementwise, like arrays.
  here, one, other = _scope(), np.zeros(2), np.zeros(2)
  here.claim_semaphore(one, _RING)
  here.claim_semaphore(other, _BACK)
  here.claim_semaphore(one, _RING)
  with pytest.raises(CollectiveError) as caught:
    here.claim_semaphore(other, _RING)
  for words in (
    "Kernel 'k' uses one semaphore for ring_shift over ('device', 'core', 7)",
    "and for ring_shift over ('device', 'core', 1)",
    "Give each a semaphore of its own",
  ):
    assert words in str(caught.value)


def test_given_semaphores_leave_the_barrier_semaphore_free():
  here = _scope()
  here.claim_semaphore(object(), _RING)
  assert here.barrier_pattern is None
  here.claim_barrier_semaphore(_ALL)


# --- nobody is reached before it is in the kernel ---------------------------


def _ends(here, *, has_own_barriers=False):
  here.check_end(has_own_barriers=has_own_barriers)


def test_reaching_workers_that_no_barrier_has_met_is_refused():
  here = _scope()
  here.meet(["device"])
  here.reach("put", ["device"])
  _ends(here)
  here.reach("signal", ["device", "core"])
  here.meet(["core"])  # Too late.
  here.reach("put", ["core"])
  with pytest.raises(CollectiveError) as caught:
    _ends(here)
  for words in (
    "Kernel 'k' reaches other workers by signal along ['core']",
    "their scratch may still be another kernel's",
    "cm.core_barrier()",
  ):
    assert words in str(caught.value)


def test_a_kernel_with_barriers_of_its_own_may_reach_anybody():
  here = _scope()
  here.reach("put", ["core"])
  _ends(here, has_own_barriers=True)


@dataclasses.dataclass
class _Copy:
  source_is_free: bool
  made_by: str = "put"


def test_ending_with_a_copy_that_nobody_has_waited_for_is_refused():
  here = _scope()
  here.copies = (_Copy(True),)
  _ends(here)
  here.copies = (_Copy(True), _Copy(False))
  with pytest.raises(CollectiveError, match="copy that put started.*wait_send"):
    _ends(here, has_own_barriers=True)


@pytest.mark.parametrize(
  ("pattern", "words"),
  [
    (None, "nothing"),
    (("swap", ("core",)), "swap over ('core')"),
    (_LINE, "neighbours over ('device', line)"),
    (_RING, "ring_shift over ('device', 'core', 1)"),
  ],
)
def test_a_pattern_is_described_in_words(pattern, words):
  assert scope.describe(pattern) == words
