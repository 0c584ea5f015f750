"""Tests for coremesh.compiler.ledger: predicted buffers against libtpu's."""

import dataclasses
import importlib
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import pytest

import coremesh as cm
from coremesh.compiler import allocations, matching, vmem_report
from tests import support

_F32 = jnp.float32
every_chip = pytest.mark.parametrize("chip", support.COMPILED_CHIPS)


def _type(*shape, dtype=_F32):
  return jax.ShapeDtypeStruct(shape, dtype)


def _product(x_ref, y_ref, o_ref, sums):
  """Sums over the last axis of the grid, so that the sums must be kept."""
  step = pl.program_id(2)

  @pl.when(step == 0)
  def _():
    sums[...] = jnp.zeros_like(sums)

  sums[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=_F32)

  @pl.when(step == pl.num_programs(2) - 1)
  def _():
    o_ref[...] = sums[...].astype(o_ref.dtype)


def _blocks(rows, columns, dtype, *, buffers=2):
  """A product by blocks, and its arguments."""
  size = 2048
  x = _type(size, size, dtype=dtype)
  kernel = pl.pallas_call(
    _product,
    out_shape=x,
    grid=(size // rows, size // columns, size // 512),
    in_specs=[
      pl.BlockSpec((rows, 512), lambda i, j, k: (i, k)),
      pl.BlockSpec(
        (512, columns),
        lambda i, j, k: (k, j),
        pipeline_mode=pl.Buffered(buffers),
      ),
    ],
    out_specs=pl.BlockSpec((rows, columns), lambda i, j, k: (i, j)),
    scratch_shapes=[pltpu.VMEM((rows, columns), _F32)],
    compiler_params=pltpu.CompilerParams(vmem_limit_bytes=60 * 2**20),
  )
  return kernel, (x, x)


@every_chip
@pytest.mark.parametrize(
  "options, dtype",
  [
    (dict(rows=256, columns=512), _F32),
    (dict(rows=128, columns=256, buffers=1), jnp.bfloat16),
  ],
)
def test_blocks_scratch_and_spills_are_what_libtpu_uses(options, dtype, chip):
  kernel, args = _blocks(dtype=dtype, **options)
  [found] = cm.compile(kernel, *args, chip=chip).ledgers
  assert found.used_vmem_bytes is not None
  assert found.used_vmem_bytes == found.expected_vmem_bytes, str(found)
  copies = {e.name: e.copies for e in found.entries}
  expected = dict(x_ref=2, y_ref=options.get("buffers", 2), o_ref=2, sums=1)
  assert copies == expected
  assert found.limit("VMEM") == 60 * 2**20


@every_chip
def test_a_block_that_is_the_whole_array_is_held_once(chip):
  def body(x_ref, y_ref, o_ref):
    o_ref[...] = x_ref[...] + y_ref[...]

  x, y = _type(4096, 4096), _type(128, 4096)
  block = pl.BlockSpec((128, 4096), lambda i, j: (i, j))
  kernel = pl.pallas_call(
    body,
    out_shape=x,
    grid=(32, 1),
    in_specs=[block, pl.BlockSpec((128, 4096), lambda i, j: (j, j))],
    out_specs=block,
  )
  [found] = cm.compile(kernel, x, y, chip=chip).ledgers
  assert [e.copies for e in found.entries] == [2, 1, 2]
  kept = 128 * 4096 * 4 if found.kept_by_xla == (1,) else 0
  assert found.used_vmem_bytes == 5 * 128 * 4096 * 4 - kept


def test_what_is_spilled_is_said():
  kernel, args = _blocks(256, 512, _F32)
  [found] = cm.compile(kernel, *args, chip="v6e").ledgers
  assert found.used_vmem_bytes is not None
  spilled = found.used_vmem_bytes - found.predicted("VMEM")
  assert found.spilled_bytes == spilled > 0
  assert f"{spilled:,} of VMEM for vectors without a register" in str(found)


def _mixed(x_ref, o_ref, count, first: Any = 0):
  """Keeps so many vectors at once: each of them is used late."""
  rows = [pl.ds(pl.multiple_of(first + 8 * i, 8), 8) for i in range(count)]
  xs = [x_ref[r] for r in rows]
  ys = [xs[i] * xs[(7 * i + 13) % count] + xs[i // 2] for i in range(count)]
  for i, r in enumerate(rows):
    o_ref[r] = ys[i] * ys[(31 * i + count // 2) % count] + xs[i]


def _branches(table, x_ref, o_ref):
  """One in the other, with vectors of both."""

  @pl.when(table[0] > 0)
  def _():
    _mixed(x_ref, o_ref, 70)
    pl.when(table[1] > 0)(lambda: _mixed(x_ref, o_ref, 90))


def _apart(table, x_ref, o_ref):
  """One after the other; what spills in a loop around them has its own room."""

  @pl.loop(0, table[2])
  def _(i):
    _mixed(x_ref, o_ref, 80, i * 8)
    pl.when(table[0] > 0)(lambda: _mixed(x_ref, o_ref, 70))

    @pl.loop(0, 4)
    def _(j):
      _mixed(x_ref, o_ref, 90, j * 8)


@every_chip
@pytest.mark.parametrize(
  "body, shares", [(_branches, False), (_apart, True)], ids=["nested", "apart"]
)
def test_spilled_registers_share_room_where_one_is_over_first(
  body, shares, chip
):
  kernel = pl.pallas_call(
    body,
    out_shape=_type(1024, 128),
    in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec()],
  )
  [found] = cm.compile(
    kernel, _type(8, dtype=jnp.int32), _type(1024, 128), chip=chip
  ).ledgers
  assert 0 < found.spilled_bytes <= found.spilled_vector_bytes
  assert (found.spilled_bytes < found.spilled_vector_bytes) == shares
  assert ("which share room: " in str(found)) == shares
  assert found.used_vmem_bytes == found.expected_vmem_bytes, str(found)


def _through_memory(x_ref, y_ref, o_ref):
  """What the vector unit of v4 can do through memory only."""
  x = x_ref[...].astype(_F32)  # bytes to words
  for row in range(8):  # a row to all sublanes
    o_ref[pl.ds(8 * row, 8)] = y_ref[pl.ds(row, 1)] * x[8 * row : 8 * row + 8]
  _mixed(o_ref, o_ref, 64)
  # Rows of several vectors to one.
  o_ref[pl.ds(0, 1)] = jnp.sum(o_ref[...], axis=0, keepdims=True)


def _of_v4():
  kernel = pl.pallas_call(_through_memory, out_shape=_type(512, 512))
  args = _type(512, 512, dtype=jnp.int8), _type(8, 512)
  [found] = cm.compile(kernel, *args, chip="v4").ledgers
  assert found.used_vmem_bytes is not None
  return found, found.used_vmem_bytes


def test_what_v4_takes_for_itself_is_said_in_libtpu_s_words():
  found, used_bytes = _of_v4()
  own = dict(found.own_vmem_bytes)
  assert own.keys() == {
    "internal scratch",
    "temp for sublane replication",
    "operations lowered through memory",
  }
  for what, num_bytes in own.items():
    assert f"{num_bytes:,} of VMEM for libtpu's own use: {what}" in str(found)
  assert found.spilled_bytes > 0
  assert used_bytes == found.expected_vmem_bytes, str(found)
  assert found.predicted("VMEM") < used_bytes
  assert "than all this explains" not in str(found)


@pytest.mark.parametrize(
  "page",
  ["", "<html></html>", "const DATA = {", 'const DATA ={"a": 1}', "DATA = {}"],
)
def test_a_report_of_another_form_is_none(page):
  assert vmem_report.of_page(page) == {}


def test_what_is_not_reported_is_said_to_be_unexplained(monkeypatch):
  monkeypatch.setattr(vmem_report, "of_page", lambda page: {})
  found, used_bytes = _of_v4()
  off = used_bytes - found.expected_vmem_bytes
  assert found.spilled_bytes == 0 and off > 0
  assert f"{off:,} of VMEM more than all this explains" in str(found)


def test_a_report_that_is_not_of_what_is_used_is_not_believed(monkeypatch):
  of_page = vmem_report.of_page

  def more(page):
    return {
      name: dataclasses.replace(one, total_bytes=one.total_bytes + 4096)
      for name, one in of_page(page).items()
    }

  assert _of_v4()[0].spilled_bytes > 0
  monkeypatch.setattr(vmem_report, "of_page", more)
  assert _of_v4()[0].spilled_bytes == 0


def test_it_is_the_same_before_compilation():
  kernel, args = _blocks(256, 512, _F32)
  [before] = cm.ledgers(kernel, *args, chip="v6e")
  [after] = cm.compile(kernel, *args, chip="v6e").ledgers
  assert before.entries == after.entries
  assert before.used_vmem_bytes is None


def test_what_xla_keeps_in_vmem_is_said():
  spec = pl.BlockSpec((64, 128), lambda i: (i, 0))

  def body(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2

  x = _type(256, 128)
  small = pl.pallas_call(
    body, out_shape=x, grid=(4,), in_specs=[spec], out_specs=spec
  )
  [found] = cm.compile(lambda x: small(x + 1), x, chip="v6e").ledgers
  assert found.kept_by_xla == (0,)
  assert found.predicted("VMEM") == 4 * 64 * 128 * 4
  assert found.expected_vmem_bytes == found.used_vmem_bytes == 2 * 64 * 128 * 4
  assert "XLA keeps in VMEM, so that libtpu needs no blocks: x_ref" in str(
    found
  )


def test_scratch_that_nothing_uses_is_said():
  def body(x_ref, o_ref, idle):
    o_ref[...] = x_ref[...] * 2

  x = _type(2048, 2048)
  spec = pl.BlockSpec((256, 2048), lambda i: (i, 0))
  kernel = pl.pallas_call(
    body,
    out_shape=x,
    grid=(8,),
    in_specs=[spec],
    out_specs=spec,
    scratch_shapes=[pltpu.VMEM((64, 128), _F32)],
  )
  [found] = cm.compile(kernel, x, chip="v5p").ledgers
  idle = 64 * 128 * 4
  assert found.predicted("VMEM") - found.expected_vmem_bytes == idle
  assert found.expected_vmem_bytes == found.used_vmem_bytes
  assert "nothing uses, so that libtpu leaves out: idle" in str(found)


@every_chip
def test_the_kernels_of_coremesh_have_a_ledger_too(chip):
  cores = cm.chip(chip).tensor_cores()

  @cm.kernel(mesh=cores, out=cm.like(0), scratch=dict(mine=cm.vmem_slab(0)))
  def double(x_hbm, o_hbm, *, mine):
    rows = cm.slab(x_hbm)
    cm.copy(x_hbm.at[rows], mine)
    mine[...] = mine[...] * 2
    cm.copy(mine, o_hbm.at[rows])

  [found] = cm.compile(double, _type(1024, 256), chip=chip).ledgers
  each = 1024 // cores.num_cores * 256 * 4
  assert found.kernel == "double"
  assert found.predicted("VMEM") == found.used_vmem_bytes == each
  assert found.predicted("semaphores") == 1


@every_chip
@pytest.mark.parametrize("name", ["indexed_add_one", "ring_shift"])
def test_every_byte_that_an_example_uses_is_explained(name, chip):
  example = importlib.import_module(f"examples.{name}")
  config = importlib.import_module(f"configs.{name}").get_config()
  slice_ = cm.chip(chip)
  build, args = example.case(slice_, config)
  mesh = slice_.device_mesh("device", on="compiler")
  [found] = cm.compile(build(slice_, mesh), *args).ledgers
  assert found.used_vmem_bytes == found.expected_vmem_bytes > 0, str(found)
  if name == "indexed_add_one":
    assert found.staged_bytes == 128 * 4
    assert "512 of VMEM to bring scalars to SMEM" in str(found)


def test_tables_semaphores_and_scopes_are_counted():
  def body(table, x_hbm, o_ref, semaphores):
    def scope(buffer, semaphore):
      copy = pltpu.make_async_copy(x_hbm, buffer, semaphore)
      copy.start()
      copy.wait()
      o_ref[...] = buffer[...] + table[0]

    pl.run_scoped(scope, pltpu.VMEM((8, 128), _F32), pltpu.SemaphoreType.DMA)

  grid_spec = pltpu.PrefetchScalarGridSpec(
    num_scalar_prefetch=1,
    grid=(1,),
    in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
    out_specs=pl.BlockSpec((8, 128), lambda i, table: (0, 0)),
    scratch_shapes=[pltpu.SemaphoreType.DMA((3,))],
  )
  kernel = pl.pallas_call(body, out_shape=_type(8, 128), grid_spec=grid_spec)
  [found] = cm.ledgers(kernel, _type(4), _type(8, 128), chip="v6e")
  assert found.predicted("SMEM") == 128 * 4
  assert found.predicted("semaphores") == 3 + 1
  assert found.predicted("VMEM") == 2 * 8 * 128 * 4  # the block, the scope
  assert found.limit("SMEM") == cm.chip("v6e").smem_bytes_per_tensor_core


@pytest.mark.parametrize("chip", ["v4", "v5p", "tpu7x"])
@pytest.mark.parametrize(
  "types",
  [
    [((7,), _F32), ((3, 5, 100), jnp.int32), ((13, 64), _F32)],
    [((2, 1, 128), _F32), ((13, 200), _F32), ((13, 64), jnp.bfloat16)],
  ],
)
def test_buffers_of_scopes_are_counted_as_libtpu_pads_them(types, chip):
  arrays = [jax.ShapeDtypeStruct(*one) for one in types]

  def body(*refs):
    def scope(*buffers):
      xs, outs = refs[: len(types)], refs[len(types) :]
      for x_hbm, buffer, o_hbm in zip(xs, buffers, outs, strict=True):
        pltpu.sync_copy(x_hbm, buffer)
        pltpu.sync_copy(buffer, o_hbm)

    pl.run_scoped(scope, *[pltpu.VMEM(*one) for one in types])

  spec = [pl.BlockSpec(memory_space=pl.ANY)] * len(types)
  kernel = pl.pallas_call(body, out_shape=arrays, in_specs=spec, out_specs=spec)
  [found] = cm.compile(kernel, *arrays, chip=chip).ledgers
  assert found.used_vmem_bytes == found.predicted("VMEM") > 0, str(found)


def test_a_subcore_is_held_against_its_own_memory():
  chip = cm.chip("v6e")
  kernel = pl.kernel(
    lambda x, o, buffer: pltpu.sync_copy(x, buffer),
    out_type=_type(8, 128),
    mesh=chip.vector_subcores(),
    scratch_types=[pltpu.VMEM((8, 128), _F32)],
    name="on_subcores",
  )
  [found] = cm.ledgers(kernel, _type(8, 128), chip=chip)
  [compiled] = cm.compile(kernel, _type(8, 128), chip=chip).ledgers
  assert compiled.entries == found.entries and found.used_vmem_bytes is None
  assert compiled.used_vmem_bytes == 8 * 128 * 4
  assert found.is_sparse and found.kernel == "on_subcores"
  assert found.limit("VMEM") == chip.vmem_bytes_per_vector_subcore
  assert found.limit("SMEM") is None
  assert found.predicted("VMEM") == 8 * 128 * 4


def _double(rows: int):
  """A float32 [2048, 2048] times two, in blocks of rows."""
  x = _type(2048, 2048)
  spec = pl.BlockSpec((rows, 2048), lambda i: (i, 0))

  def body(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2

  return pl.pallas_call(
    body, out_shape=x, grid=(2048 // rows,), in_specs=[spec], out_specs=spec
  )


def test_kernels_of_one_name_are_told_apart_by_their_blocks():
  one, other = _double(128), _double(256)
  x = _type(2048, 2048)
  first, last = cm.compile(lambda x: other(one(x)), x, chip="v6e").ledgers
  # XLA keeps what goes between in VMEM; a block is held twice.
  assert (
    first.used_vmem_bytes == first.expected_vmem_bytes == 2 * 128 * 2048 * 4
  )
  assert last.used_vmem_bytes == last.expected_vmem_bytes == 2 * 256 * 2048 * 4


def test_kernels_whose_modules_do_not_say_which_is_which_are_not_filled_in(
  monkeypatch,
):
  monkeypatch.setattr(matching, "_form_of_module", lambda text: None)
  one, other = _double(256), _double(128)
  x = _type(2048, 2048)
  compiled = cm.compile(lambda x: other(one(x)), x, chip="v6e")
  assert [one.used_vmem_bytes for one in compiled.ledgers] == [None, None]
  assert len(compiled.kernels) == 2 and not compiled.dropped


def test_kernels_that_the_program_does_without_are_not_in_it():
  def program(x):
    one, other = _double(256), _double(128)
    other(x)  # Nothing needs it.
    return one(x)

  compiled = cm.compile(program, _type(2048, 2048), chip="v6e")
  assert [k.usage.vmem_bytes_per_core for k in compiled.kernels] == [8 * 2**20]
  [found] = compiled.ledgers
  assert found.used_vmem_bytes == found.predicted("VMEM") == 8 * 2**20
  assert compiled.dropped == ("body",)
  assert sum(o.kernel == "body" for o in compiled.operations) == 1


_MIB = 2**20


def _held(num_bytes):
  """A kernel that must hold scratch: which of its rows are read, data say."""

  def body(x_ref, o_ref, scratch):
    first, last = (x_ref[0, n].astype(jnp.int32) * 8 for n in (0, 1))
    scratch[pl.ds(pl.multiple_of(first, 8), 8)] = x_ref[...]
    o_ref[...] = scratch[pl.ds(pl.multiple_of(last, 8), 8)]

  scratch = pltpu.VMEM((num_bytes // 512, 128), _F32)
  return pl.pallas_call(body, out_shape=_type(8, 128), scratch_shapes=[scratch])


@every_chip
def test_what_a_kernel_may_take_by_default_is_what_libtpu_allows(chip):
  [found] = cm.ledgers(_held(_MIB), _type(8, 128), chip=chip)
  limit = found.limit("VMEM")
  assert limit is not None
  cm.compile(_held(limit - _MIB // 8), _type(8, 128), chip=chip)
  with pytest.raises(cm.CompileError, match="must fit its scoped limit"):
    cm.compile(_held(limit + _MIB // 8), _type(8, 128), chip=chip)


def test_where_the_limit_bites_it_says_how_to_raise_it():
  [small] = cm.ledgers(_held(_MIB), _type(8, 128), chip="v5p")
  [large] = cm.ledgers(_held(15 * _MIB), _type(8, 128), chip="v5p")
  flag = "xla_tpu_scoped_vmem_limit_kib"
  assert flag not in str(small)
  assert f"of {16 * _MIB:,} a kernel may take; the core has" in str(large)
  assert "vmem_limit_bytes=...) or the flag xla_tpu_scoped" in str(large)
  flags = {flag: 20 * 1024}
  compiled = cm.compile(_held(_MIB), _type(8, 128), chip="v5p", flags=flags)
  assert compiled.ledgers[0].limit("VMEM") == 20 * _MIB


@every_chip
def test_scratch_that_is_held_in_registers_is_said(chip):
  def body(x_ref, o_ref, kept, passing, count):
    kept[...] = jnp.zeros_like(kept)
    count[0] = 1

    @pl.loop(0, 32)
    def _(i):
      kept[...] += x_ref[pl.ds(i * 8, 8), :128]

    passing[...] = kept[...] * 2
    o_ref[...] = passing[...] + count[0].astype(_F32)

  x = _type(4096, 2048)
  kernel = pl.pallas_call(
    body,
    out_shape=_type(128, 128),
    grid=(16,),
    in_specs=[pl.BlockSpec((256, 2048), lambda i: (i, 0))],
    out_specs=pl.BlockSpec((8, 128), lambda i: (i, 0)),
    scratch_shapes=[
      pltpu.VMEM((8, 128), _F32),
      pltpu.VMEM((8, 128), _F32),
      pltpu.SMEM((4,), jnp.int32),
    ],
  )
  [found] = cm.compile(kernel, x, chip=chip).ledgers
  names = [e.name for e in found.entries if e.argument in found.in_registers]
  assert names == ["passing"]
  assert found.predicted("VMEM") - 8 * 128 * 4 == found.used_vmem_bytes
  assert found.expected_vmem_bytes == found.used_vmem_bytes
  assert "libtpu holds in registers: passing" in str(found)


@every_chip
@pytest.mark.parametrize(
  "name", ["add_one", "indexed_add_one", "ring_shift", "sc_add_one"]
)
def test_what_is_allocated_of_each_memory_is_what_was_predicted(name, chip):
  """Of SMEM and semaphores, and of a subcore's memory, Mosaic says it."""
  slice_ = cm.chip(chip)
  build, args = importlib.import_module(f"examples.{name}").case(
    slice_, importlib.import_module(f"configs.{name}").get_config()
  )
  mesh = slice_.device_mesh("device", on="compiler")
  [found] = cm.compile(build(slice_, mesh), *args).ledgers
  for memory in ("SMEM", "semaphores"):
    assert found.used(memory) == found.predicted(memory), str(found)
  assert found.predicted("semaphores") > 0
  if found.is_sparse:
    assert 0 < found.expected_vmem_bytes == found.used_vmem_bytes


def test_a_program_of_another_form_says_nothing_of_what_it_uses():
  assert allocations.of_module("") is None
  assert allocations.of_module("func.func @f(%x: i32) {") is None


def test_the_barrier_of_a_kernel_is_in_its_ledger():
  chip = cm.chip("v5p")

  @cm.kernel(mesh=chip.tensor_cores(), out=cm.like(0), collective_id=7)
  def meet(x_hbm, o_hbm):
    cm.core_barrier("core")
    rows = cm.slab(x_hbm)
    cm.copy(x_hbm.at[rows], o_hbm.at[rows])

  [found] = cm.ledgers(meet, _type(16, 256), chip=chip)
  assert "barrier    of collective_id 7" in str(found)
