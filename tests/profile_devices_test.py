"""Tests for coremesh.profile.devices: cores and devices that send each other.

The recorded programs have their own signals deleted and their copies enlarged,
so that each number and each error comes from what the machine code says.
"""

import dataclasses
import functools
import re

import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import pytest

import coremesh as cm
from coremesh.errors import UnsupportedError
from coremesh.profile import (
  addresses,
  bundles,
  devices,
  dma,
  events,
  interconnect,
  rates,
  translate,
)
from tests import profiling

_V5P, _V6E = cm.chip("v5p:2x2x1"), cm.chip("v6e:2x2")


# As XLA writes what both cores of a device multiply by: one starts the copy.
_TO_BOTH = """
= control target key start
= control target key end

     0   :  { %s1_s0 = inlined_call_operand.hbm [shape: f32[64,128], index: 0, kind: input, shape index: {}] /* operand 0 */ }
   0x1   :  { %s2_s1 = sld [smem:[#allocation8]] /* megacore core id :: core id */  ;;  %s3_s2 = scalar_lea.sflag [#allocation3], 0 }
   0x2   :  { %s4_s3 = sor.u32 24576, %s3_s2  ;;  %p5_p0 = scmp.eq.s32.totalorder %s2_s1, 0 }
   0x3   :  { %s6_s4 = sshll.u32 %s4_s3, 16 }
   0x4   :  { %s7_s5 = sor.u32 %s6_s4, %s3_s2 }
   0x5   :  { %8 = dma.hbm_to_vmem [thread:$0]  (%p5_p0), /*hbm=*/%s1_s0, /*size_in_granules=*/1024, /*vmem=*/[#allocation2], /*dst_syncflagno=*/%s7_s5 }
   0x6   :  { %9 = dma.done.wait %s3_s2, 1024 }
   0x7   :  { %10 = vsyncadd %s3_s2, 4294966272 }
"""  # noqa: E501


def _cast(text: str, chip: cm.Chip, num_devices: int) -> devices.Cast:
  rate = rates.rates(chip)
  code = translate.Code(
    bundles.parse(text), delay_slots=rate.delay_slots, num_devices=num_devices
  )
  return devices.cast(code, chip, rate, num_devices=num_devices, operands={})


def _cycles(cast: devices.Cast, chip: cm.Chip, **changes) -> float:
  """When the last core is through, by the central model."""
  rate = rates.rates(chip)
  links = interconnect.links(chip, rate, "central")
  links = dataclasses.replace(links, **changes)
  found = dma.timings(cast.traces, rate.hbm("central"), links=links)
  assert all(not core.left_over for core in found)
  return max(core.cycles for core in found)


def _without(pattern: str, text: str) -> str:
  """A program without the instructions of a pattern."""
  changed, count = re.subn(rf"%\d+ = {pattern}[^;}}]*", "", text)
  assert count
  return changed


def test_cores_that_swap_wait_for_each_others_signal_and_copy():
  cast = _cast(profiling.recorded("v5p-swap"), _V5P, 1)
  assert len(cast.traces) == 2 and not cast.assumed
  receivers = [[to.core for to in trace.targets()] for trace in cast.traces]
  assert receivers == [[1, 1], [0, 0]]
  sent = [e for e in cast.traces[0].each_event() if e.to is not None]
  assert [e.kind for e in sent] == ["signal", "send"]
  assert sent[1].amount * 32 == 8 * 128 * 4
  fast = _cycles(cast, _V5P, core_cycles=0)
  slow = _cycles(cast, _V5P, core_cycles=1000)
  # The signal, and then the copy; bundles between go on meanwhile.
  assert 0 <= fast + 2000 - slow < 20


@pytest.mark.parametrize("what", [r"vsyncadd\.remote", r"dma\.general"])
def test_without_its_signal_or_copy_the_deadlock_names_both_waits(what):
  text = _without(what, profiling.recorded("v5p-swap"))
  with pytest.raises(UnsupportedError) as error:
    _cycles(_cast(text, _V5P, 1), _V5P)
  for core in (0, 1):
    assert f"core {core} of device 0 waits at bundle 0x" in str(error.value)
  assert str(error.value).count("coremesh/") == 2


def test_a_ring_of_devices_is_one_device_that_receives_what_it_sends():
  cast = _cast(profiling.recorded("v6e-ring"), _V6E, 4)
  [trace] = cast.traces
  assert {(to.device, to.way, to.hops) for to in trace.targets()} == {
    (0, "link", 1)
  }
  assert not cast.assumed
  alone = _cycles(cast, _V6E)
  # All devices, each with its own HBM and links, take as long.
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(devices, "_is_alike", lambda *_: False)
    everyone = _cast(profiling.recorded("v6e-ring"), _V6E, 4)
  assert [t.device for t in everyone.traces] == [0, 1, 2, 3]
  assert _cycles(everyone, _V6E) == alone


def test_three_steps_of_a_ring_take_three_signals_and_three_copies():
  cast = _cast(profiling.recorded("v6e-ring"), _V6E, 4)
  near, far = (_cycles(cast, _V6E, hop_cycles=hop) for hop in (0, 1000))
  # The bundles between two waits take part of the way of the first signal.
  assert 0 <= near + 3 * 2 * 1000 - far < 20


def test_double_the_bytes_take_double_the_time_of_the_link():
  text = profiling.recorded("v6e-ring")
  cast = _cast(text, _V6E, 4)
  slow = dict(bytes_per_cycle=0.5)  # So that all else is little.
  once = _cycles(cast, _V6E, **slow)
  alone = _cycles(cast, _V6E, bytes_per_cycle=1e9)
  for opcode in ("dma.general", "dma.done.wait"):
    lines = text.splitlines()
    for i, line in enumerate(lines):
      if opcode in line and "allocation4" not in line:
        lines[i] = line.replace("/*size_in_granules=*/128", "/*s*/256")
        lines[i] = re.sub(r"(\], )128\b", r"\g<1>256", lines[i])
        lines[i] = lines[i].replace("/*s*/", "/*size_in_granules=*/")
    text = "\n".join(lines) + "\n"
  text = re.sub(
    r"(vsyncadd \[#allocation[56]\], )4294967168", r"\g<1>4294967040", text
  )
  twice = _cycles(_cast(text, _V6E, 4), _V6E, **slow)
  assert twice - alone == pytest.approx(2 * (once - alone), rel=1e-6)


def test_a_ring_without_its_signals_names_every_device_that_waits():
  text = _without(r"vsyncadd\.remote", profiling.recorded("v6e-ring"))
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(devices, "_is_alike", lambda *_: False)
    cast = _cast(text, _V6E, 4)
  with pytest.raises(UnsupportedError) as error:
    _cycles(cast, _V6E)
  for device in range(4):
    assert f"core 0 of device {device} waits at" in str(error.value)
  assert "to hold 0, where all that is sent to it makes -1" in str(error.value)


def test_a_program_of_more_devices_than_are_run_is_named_as_assumed(
  monkeypatch,
):
  monkeypatch.setattr(devices, "MOST_DEVICES", 2)
  monkeypatch.setattr(devices, "_MOST_EVENTS", 0)
  cast = _cast(profiling.recorded("v6e-ring"), _V6E, 4)
  assert len(cast.traces) == 1 or cast.assumed
  [found] = cast.assumed
  assert found.startswith("16 of 4") or "of 4 devices do the same" in found


@functools.cache
def _predicted(chip: str, **options) -> cm.OperationPrediction:
  fn, args = profiling.ring(8, chip, **options)
  [found] = cm.predict(jax.jit(fn), *args).kernels
  return found


@pytest.mark.parametrize("chip", ["v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_a_ring_is_predicted_and_says_that_its_links_are_not_measured(chip):
  found = _predicted(chip)
  assert interconnect.ASSUMED in found.assumed
  assert found.cores[0].sent_bytes == 3 * 8 * 128 * 4
  # Three steps, of a signal and a copy each, over at least one link.
  assert found.microseconds.low > 3 * 2 * 0.5
  assert found.limit == "waiting"


def test_a_device_that_does_more_holds_up_the_ring():
  def is_second(device):
    return device == 1

  alike = _predicted("v6e:2x2")
  fn, args = profiling.ring(8, "v6e:2x2", extra=is_second)
  [uneven] = cm.predict(jax.jit(fn), *args).kernels
  latency = rates.rates(_V6E).hbm_latency_seconds.central * 1e6
  extra = uneven.microseconds.central - alike.microseconds.central
  assert extra == pytest.approx(latency, rel=0.2)  # One copy, all but alone.


def _sends_to(chip: cm.Chip, *places: int) -> cm.OperationPrediction:
  """A core that sends 1 MiB to each of some devices of a ring, and waits."""
  axis, scratch = "device", pltpu.VMEM((len(places), 2048, 128), jnp.float32)

  @cm.kernel(
    mesh=chip.tensor_cores("core", 1),
    out=cm.like(0),
    scratch=dict(mine=scratch, theirs=scratch),
  )
  def send(x_hbm, o_hbm, *, mine, theirs):
    cm.device_barrier(axis)
    me, number = jax.lax.axis_index(axis), jax.lax.axis_size(axis)
    puts = [
      cm.put(mine.at[i], theirs.at[i], to={axis: (me + place) % number})
      for i, place in enumerate(places)
    ]
    for put in puts:
      put.wait()

  mesh = chip.device_mesh(axis, on="compiler")
  spec = jax.sharding.PartitionSpec(axis)
  fn = jax.shard_map(send, mesh=mesh, in_specs=spec, out_specs=spec)
  x = profiling.shape(8 * chip.num_devices, 128)
  [found] = cm.predict(jax.jit(fn), x, chip=chip.name).kernels
  return found


def test_one_device_that_stands_for_all_has_a_link_to_each_receiver():
  one, both = _sends_to(_V6E, 1), _sends_to(_V6E, 1, 3)
  assert both.cores[0].sent_bytes == 2 * one.cores[0].sent_bytes == 2 << 20
  # Half goes each way round at once: 1 MiB over a link is 12 us.
  extra = both.microseconds.central - one.microseconds.central
  assert abs(extra) < 1
  assert both.shares["ICI"] == pytest.approx(one.shares["ICI"], rel=0.05)
  assert both.limit == "ICI"


def _senders(*receivers: tuple[int, int]) -> list[list[events.Trace]]:
  """Devices of one core that signal a device, so many links away."""
  return [
    [
      events.Trace(
        core=0,
        cycles=9,
        runs=(),
        events=(
          events.Event(
            *(1, "signal", 1, -1, 1),
            to=events.Target(device=to, core=0, flag=4, way="link", hops=hops),
          ),
        ),
        assumed=(),
        skipped=0,
        device=device,
      )
    ]
    for device, (to, hops) in enumerate(receivers)
  ]


@pytest.mark.parametrize(
  ("receivers", "run"),
  [
    (((1, 1), (2, 1), (0, 1)), [0]),  # a ring
    (((1, 1), (2, 2), (0, 1)), [0, 1, 2]),  # with a way that is longer
    (((0, 1), (0, 1), (0, 1)), [0, 1, 2]),  # all to one
  ],
)
def test_one_device_stands_for_all_only_if_each_receives_as_it_sends(
  receivers, run
):
  found = devices._chosen(_senders(*receivers), 3, [])
  assert [trace.device for trace in found.traces] == run
  assert not found.assumed


def test_receivers_are_decoded_as_libtpu_encodes_them():
  word = 3 << 17 | 1 << 15 | 1 << 14 | 77
  assert addresses.of_signal(word)[:3] == (3, 1, 77)
  overrides = 1 << 27 | 1 << 26 | 1 << 14 | 5
  assert addresses.is_remote(overrides)
  assert not addresses.is_remote(0)
  found = addresses.of_copy(overrides, 1 << 14 | 1 << 13 | 9, "vmem", "hbm")
  assert found[:3] == (5, 1, 9)


@pytest.mark.parametrize("num_devices", [1, 4])
def test_a_copy_into_both_cores_is_read_once_and_waited_for_by_both(
  num_devices,
):
  cast = _cast(_TO_BOTH, _V5P, num_devices)
  links = interconnect.links(_V5P, rates.rates(_V5P), "central")
  hbm = rates.rates(_V5P).hbm("central")
  first, second = dma.timings(cast.traces, hbm, links=links)
  assert (first.read_bytes, second.read_bytes) == (1024 * 32, 0)
  assert not first.left_over and not second.left_over
  copied = 1024 * 32 / hbm.bytes_per_cycle + hbm.latency_cycles
  # Each bundle is a cycle; of the copy's own times fractions are rounded.
  assert first.waiting_cycles == pytest.approx(copied - 1, abs=0.1)
  assert second.cycles - first.cycles == pytest.approx(
    links.core_cycles, abs=0.1
  )


@pytest.mark.parametrize(
  ("chip", "one", "other", "hops"),
  [
    ("v5p:2x2x1", 0, 3, 2),
    ("v5p:4x4x4", 0, 3, 1),  # round the ring of four
    ("v5p:4x4x4", 0, 2, 2),
    ("v5p:4x4x4", 0, 63, 3),
    ("v6e:4x4", 0, 3, 3),  # no ring
    ("tpu7x:2x2x1", 0, 1, 0),  # two devices of a chip
    ("tpu7x:2x2x1", 0, 2, 1),
  ],
)
def test_hops_are_those_of_the_slice(chip, one, other, hops):
  found = cm.chip(chip)
  table = range(found.num_devices)
  assert addresses.Slice(chip=found, table=table).hops(one, other) == hops


def test_a_receiver_that_is_no_device_of_the_program_is_an_error():
  target = addresses.of_signal(9 << 17)
  place = addresses.Slice(chip=_V6E, table=(0, 1, 3, 2))
  with pytest.raises(UnsupportedError, match="must be a device of the program"):
    place.receiver(target, 0)


@pytest.mark.parametrize("size", [4, 64])
def test_a_barrier_of_all_devices_is_predicted(size):
  chip = cm.chip({4: "v6e:2x2", 64: "v5p:4x4x4"}[size])

  @cm.kernel(mesh=chip.tensor_cores("core"), out=cm.like(0))
  def meet(x_hbm, o_hbm):
    cm.device_barrier("device")

  mesh = chip.device_mesh("device", on="compiler")
  spec = jax.sharding.PartitionSpec("device")
  fn = jax.shard_map(meet, mesh=mesh, in_specs=spec, out_specs=spec)
  x = profiling.shape(8 * size, 128)
  [found] = cm.predict(jax.jit(fn), x, chip=chip.name).kernels
  assert found.assumed == (interconnect.ASSUMED,)
  assert found.microseconds.low >= 0.5
