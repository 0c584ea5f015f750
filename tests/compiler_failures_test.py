"""Tests for coremesh.compiler.failures: what libtpu and Mosaic really say.

Each case is a kernel that the real compiler refuses. The explanation must name
the rule with the numbers of the case, the user's line must be one of this
file, and the compiler's own words must follow.
"""

from collections.abc import Callable
import functools
import inspect
import pickle
import re
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc
import jax.numpy as jnp
import pytest

import coremesh as cm
from coremesh.compiler import failures, workers
from coremesh.errors import CompileError

_F32, _BF16, _I32, _I8 = jnp.float32, jnp.bfloat16, jnp.int32, jnp.int8
_CASES: dict[str, tuple[Callable[[], Any], str, str, str]] = {}


def _case(rule: str, said: str, chip: str = "v5p"):
  """Adds a case: what the rule must say, what the compiler did, the chip."""

  def add(fn):
    _CASES[fn.__name__] = (fn, rule, said, chip)
    return fn

  return add


def _type(*shape, dtype=_F32):
  return jax.ShapeDtypeStruct(shape, dtype)


def _on_core(body, *args, out=None, scratch=(), cores=1, **params):
  """A kernel on TensorCores, and its arguments; all are in HBM."""
  kernel = pl.kernel(
    body,
    out_type=out or args[0],
    mesh=pltpu.TensorCoreMesh(axis_name="core", num_cores=cores),
    scratch_types=list(scratch),
    compiler_params=pltpu.CompilerParams(**params),
  )
  return kernel, args


def _on_subcores(body, *args, out=None, scratch=(), mesh="v5p", **params):
  """A kernel on vector subcores, and its arguments."""
  kernel = pl.kernel(
    body,
    out_type=out or args[0],
    mesh=cm.chip(mesh).vector_subcores(),
    scratch_types=list(scratch),
    compiler_params=pltpu.CompilerParams(**params),
  )
  return kernel, args


def _call(body, *args, out=None, spec=None, grid=(), **options):
  """A `pl.pallas_call`, and its arguments; all are in VMEM, or in blocks."""
  specs = {}
  if spec is not None:
    specs = dict(in_specs=[spec] * len(args), out_specs=spec)
  kernel = pl.pallas_call(
    body, out_shape=out or args[0], grid=grid, **specs, **options
  )
  return kernel, args


def _through(x_hbm, o_hbm, buffer):
  pltpu.sync_copy(x_hbm, buffer)
  pltpu.sync_copy(buffer, o_hbm)


def _copy(x_ref, o_ref):
  o_ref[...] = x_ref[...]


_SMEM = pl.BlockSpec(memory_space=pltpu.SMEM)
_ANY = pl.BlockSpec(memory_space=pl.ANY)

# --- memory ----------------------------------------------------------------


@_case(r"128\.00M are needed without blocks, 64\.00M", "buffer 128.00M")
def a_buffer_larger_than_vmem():
  x = _type(8192, 4096)
  return _on_core(_through, x, scratch=[pltpu.VMEM(x.shape, _F32)])


def _transpose(x_ref, o_ref):
  o_ref[...] = x_ref[...] + x_ref[...].T


@_case(r"scoped limit: 2\.0\dM are needed, 1\.00M are allowed", "ScopedVmemOom")
def values_larger_than_the_scoped_limit():
  params = pltpu.CompilerParams(vmem_limit_bytes=2**20)
  return _call(_transpose, _type(512, 512), compiler_params=params)


@_case(r"must fit VMEM: 64\.00M are needed, 63\.\d+M", "memory space vmem")
def blocks_larger_than_vmem():
  x = _type(4096, 2048)
  spec = pl.BlockSpec(x.shape, lambda i: (0, 0))
  return _call(_copy, x, spec=spec, grid=(1,))


@_case(r"fit the smem of a core, 1048576 bytes.*2097152", "space=smem")
def a_buffer_larger_than_smem():
  x = _type(2**19, dtype=_I32)
  return _on_core(_through, x, scratch=[pltpu.SMEM(x.shape, _I32)])


@_case(r"smem .*\(prefetched SMEM operand 0\) takes 4000256", "space=smem")
def a_prefetched_table_larger_than_smem():
  def body(table, x_ref, o_ref):
    o_ref[...] = x_ref[...] + table[0]

  spec = pl.BlockSpec((8, 128), lambda i, table: (0, 0))
  grid_spec = pltpu.PrefetchScalarGridSpec(
    num_scalar_prefetch=1, grid=(1,), in_specs=[spec], out_specs=spec
  )
  x = _type(8, 128, dtype=_I32)
  kernel = pl.pallas_call(body, out_shape=x, grid_spec=grid_spec)
  return kernel, (_type(10**6, dtype=_I32), x)


@_case(r"semaphores .* 2048 bytes at 4 a semaphore; they take 20000", "sflag")
def too_many_semaphores():
  def body(x_hbm, o_hbm, semaphores):
    pltpu.sync_copy(x_hbm, o_hbm)

  x = _type(8, 128)
  return _on_core(body, x, scratch=[pltpu.SemaphoreType.DMA((5000,))])


@_case(r"HBM of a device: 512\.00G are needed", "CompileTimeHbmOom")
def a_program_larger_than_hbm():
  return (lambda x: x @ x), (_type(2**18, 2**18),)


@_case(r"subcores of a SparseCore must fit its shared spmem", "AllocationFail")
def buffers_larger_than_a_sparse_cores_memory():
  x = _type(2048, 128)
  return _on_subcores(_through, x, scratch=[pltpu.VMEM(x.shape, _F32)])


@_case(r"Scratch must be in vmem, smem and", "only supported for vmem")
def scratch_in_hbm():
  x = _type(8, 128)
  return _on_core(_through, x, scratch=[pltpu.HBM(x.shape, _F32)])


# --- alignment -------------------------------------------------------------


@_case(r"copied must start at a multiple .* 8 along axis 0", "aligned to tiles")
def a_copy_from_an_unaligned_row():
  def body(x_hbm, o_hbm, buffer):
    _through(x_hbm.at[pl.ds(3, 8)], o_hbm, buffer)

  x, out = _type(64, 128, dtype=_BF16), _type(8, 128, dtype=_BF16)
  return _on_core(body, x, out=out, scratch=[pltpu.VMEM(out.shape, _BF16)])


@_case(r"multiple of the tile: 128 along axis 1", "aligned to tiles")
def a_copy_from_an_unaligned_lane_of_each_core():
  def body(x_hbm, o_hbm, buffer):
    start = jax.lax.axis_index("core") + 1
    _through(x_hbm.at[:, pl.ds(start, 128)], o_hbm, buffer)

  x, out = _type(8, 512), _type(8, 128)
  scratch = [pltpu.VMEM(out.shape, _F32)]
  return _on_core(body, x, out=out, scratch=scratch, cores=2)


@_case(r"load or store must start at a multiple of 128 along axis 1", "E2003")
def a_load_from_an_unknown_lane():
  def body(start, x_ref, o_ref):
    o_ref[...] = x_ref[:, pl.ds(start[0], 128)]

  kernel = pl.pallas_call(
    body, out_shape=_type(8, 128), in_specs=[_SMEM, pl.BlockSpec()]
  )
  return kernel, (_type(1, dtype=_I32), _type(8, 512))


@_case(r"innermost run .* multiple of 512 bytes", "contiguous inner slice")
def a_copy_of_part_of_a_row():
  def body(x_hbm, o_hbm, buffer):
    _through(x_hbm.at[:, pl.ds(0, 100)], o_hbm, buffer)

  out = _type(8, 100)
  scratch = [pltpu.VMEM(out.shape, _F32)]
  return _on_core(body, _type(8, 512), out=out, scratch=scratch)


@_case(
  r"multiples of 8 and 128, .* args\[0\] is not \(array \(64, 400\)\)",
  "last two dimensions of your block shape",
)
def a_block_of_a_bad_shape():
  spec = pl.BlockSpec((64, 100), lambda i: (0, i))
  return _call(_copy, _type(64, 400), spec=spec, grid=(4,))


@_case(r"block of one axis must be .* args\[0\] is not", "rank 1 block shapes")
def a_block_of_one_axis():
  spec = pl.BlockSpec((100,), lambda i: (i,))
  return _call(_copy, _type(1000), spec=spec, grid=(10,))


@_case(r"reshape in a kernel must keep the last axis", "unsupported shape cast")
def a_reshape_across_lanes():
  def body(x_ref, o_ref):
    o_ref[...] = x_ref[...].reshape(16, 100)

  return _call(body, _type(8, 200), out=_type(16, 100))


@_case(r"stride needs an array whose last size is 128", "last dim size is not")
def a_load_with_a_stride():
  def body(x_ref, o_ref):
    o_ref[...] = x_ref[:, ::2]

  return _call(body, _type(8, 256), out=_type(8, 128))


@_case(r"Both ends of a copy must have the same shape", "shape mismatch")
def a_copy_between_two_shapes():
  def body(x_hbm, o_hbm, buffer):
    pltpu.sync_copy(x_hbm, buffer.at[pl.ds(0, 4)])

  x = _type(8, 128)
  return _on_core(body, x, scratch=[pltpu.VMEM(x.shape, _F32)])


def _by_indices(x_hbm, rows_hbm, o_hbm, rows, buffer):
  pltpu.sync_copy(rows_hbm, rows)
  pltpu.sync_copy(x_hbm.at[rows], buffer)
  pltpu.sync_copy(buffer, o_hbm)


def _gather(columns: int, *, dtype=_I32):
  """A gather of 8 rows on a subcore, and its arguments."""
  out = _type(8, columns)
  return _on_subcores(
    _by_indices,
    _type(64, columns),
    _type(8, dtype=dtype),
    out=out,
    scratch=[pltpu.VMEM((8,), _I32), pltpu.VMEM(out.shape, _F32)],
    needs_layout_passes=False,
  )


@_case(
  r"moves rows of a multiple of 128 elements; got 100\.", "expected slice size"
)
def a_gather_of_rows_that_are_no_whole_tiles():
  return _gather(100)


# --- dtypes ----------------------------------------------------------------


@_case(r"the same type; got i16 and i32", "element type mismatch")
def a_copy_between_two_types():
  return _gather(128, dtype=jnp.int16)


@_case(r"multiplies no vector<128x128xi8> \(RHS\)", "E2001", chip="v4")
def an_integer_product_on_a_chip_without():
  def body(x_ref, y_ref, o_ref):
    o_ref[...] = jnp.dot(x_ref[...], y_ref[...], preferred_element_type=_I32)

  x = _type(128, 128, dtype=_I8)
  return _call(body, x, x, out=_type(128, 128, dtype=_I32))


@_case(r"no elements of 64 bits", "X{64|128} element types")
def integers_of_64_bits():
  return _call(_copy, _type(8, 128, dtype=jnp.int64))


@_case(r"product of integers is an integer", "float acc with int")
def an_integer_product_into_floats():
  def body(x_ref, y_ref, o_ref):
    o_ref[...] = jnp.dot(x_ref[...], y_ref[...], preferred_element_type=_F32)

  x = _type(128, 128, dtype=_I8)
  return _call(body, x, x, out=_type(128, 128))


@_case(r"casts nothing to 4-bit floats; TPUv7 does", "4-bit not supported")
def a_cast_to_four_bits():
  def body(x_ref, o_ref):
    o_ref[...] = x_ref[...].astype(jnp.float4_e2m1fn)

  out = _type(64, 128, dtype=jnp.float4_e2m1fn)
  return _call(body, _type(64, 128), out=out)


@_case(r"arithmetic in a kernel needs 16 or 32 bits; got i8", "'i8'")
def a_product_of_bytes():
  def body(x_ref, o_ref):
    o_ref[...] = x_ref[...] * x_ref[...]

  return _call(body, _type(32, 128, dtype=_I8))


@_case(r"no instruction divsi for vector<.*i16>", "failed to legalize")
def a_division_of_short_integers():
  def body(x_ref, o_ref):
    o_ref[...] = x_ref[...] // jnp.int16(3)

  return _call(body, _type(16, 128, dtype=jnp.int16))


@_case(r"cannot load f16", "Invalid vector type for load")
def half_precision_of_ieee():
  def body(x_ref, o_ref):
    o_ref[...] = x_ref[...] * x_ref[...]

  return _call(body, _type(16, 128, dtype=jnp.float16))


@_case(r"real numbers and integers only", "elementType")
def complex_numbers():
  return _call(_copy, _type(8, 128, dtype=jnp.complex64))


# --- operations ------------------------------------------------------------


@_case(r"core \(tc\) has no operation sort", "Unimplemented primitive")
def a_sort():
  def body(x_ref, o_ref):
    o_ref[...] = jnp.sort(x_ref[...], axis=-1)

  return _call(body, _type(8, 128))


@_case(r"gathers along one axis only", "take_along_axis-like")
def a_gather_of_rows():
  def body(rows, x_ref, o_ref):
    o_ref[...] = x_ref[...][rows[...]]

  return _call(body, _type(8, dtype=_I32), _type(64, 128), out=_type(8, 128))


@_case(r"scan in a kernel returns its carry only", "extensive output")
def a_scan_with_results():
  def body(x_ref, o_ref):
    step = lambda total, row: (total + row, total)
    o_ref[...] = jax.lax.scan(step, jnp.zeros((128,)), x_ref[...])[1]

  return _call(body, _type(8, 128))


@_case(r"store to VMEM takes a vector", "Cannot store scalars")
def a_scalar_stored_to_vmem():
  def body(x_ref, o_ref):
    o_ref[0, 0] = x_ref[0, 0] * 2

  return _call(body, _type(8, 128))


@_case(r"load from SMEM takes one element", "Can only load scalars")
def a_vector_from_smem():
  kernel = pl.pallas_call(_copy, out_shape=_type(8, 128), in_specs=[_SMEM])
  return kernel, (_type(8, 128),)


@_case(r"the operand is in HBM \(memory space ANY\)", "only allowed on VMEM")
def a_load_from_hbm():
  return _call(_copy, _type(8, 128), spec=_ANY)


@_case(r"copies no rows by a vector of indices", "must be variadic")
def a_gather_by_copies():
  def body(x_hbm, rows_hbm, o_hbm, rows, buffer):
    pltpu.sync_copy(rows_hbm, rows)
    _through(x_hbm.at[rows], o_hbm, buffer)

  scratch = [pltpu.VMEM((8,), _I32), pltpu.VMEM((8, 128), _F32)]
  rows = _type(8, dtype=_I32)
  out = _type(8, 128)
  return _on_core(body, _type(64, 128), rows, out=out, scratch=scratch)


@_case(r"vector must have at least one element", "positive constant sizes")
def an_empty_block():
  return _call(_copy, _type(0, 128))


# --- cores -----------------------------------------------------------------


@_case(r"device of v5p:2x2x1 has, 2; the mesh of 'body' has 4", "nothing")
def too_many_tensor_cores():
  def body(x_hbm, o_hbm):
    pltpu.sync_copy(x_hbm, o_hbm)

  return _on_core(body, _type(8, 128), cores=4)


@_case(
  r"at most the cores a device has, 2; axis 0 asks for 4",
  "active cores",
  chip="v6e",
)
def too_many_sparse_cores():
  def body(x_hbm, o_hbm):
    pltpu.sync_copy(x_hbm, o_hbm)

  return _on_subcores(body, _type(64), mesh="v5p")


@_case(r"v5e has no SparseCores", "not available", chip="v5e")
def a_sparse_core_kernel_for_a_chip_without():
  def body(x_hbm, o_hbm):
    pltpu.sync_copy(x_hbm, o_hbm)

  return _on_subcores(body, _type(64), mesh="v6e")


@_case(r"at most the cores a device has, 2; axis 0 asks for 8", "active cores")
def a_grid_axis_over_more_cores():
  spec = pl.BlockSpec((8, 128), lambda i: (i, 0))
  params = pltpu.CompilerParams(dimension_semantics=("core_parallel",))
  x = _type(64, 128)
  return _call(_copy, x, spec=spec, grid=(8,), compiler_params=params)


@_case(r"each of the 1 axes of the grid; there are 2", "dimension semantics")
def semantics_of_an_axis_that_is_not_there():
  spec = pl.BlockSpec((8, 128), lambda i: (i, 0))
  params = pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"))
  x = _type(64, 128)
  return _call(_copy, x, spec=spec, grid=(8,), compiler_params=params)


@_case(r"uses the barrier semaphore needs a collective_id", "has to be spec")
def a_barrier_without_an_id():
  def body(x_hbm, o_hbm):
    barrier = pltpu.get_barrier_semaphore()
    pltpu.core_barrier(barrier, core_axis_name="core")

  return _on_core(body, _type(8, 128), cores=2)


@_case(r"does not use the barrier semaphore has no", "has to be unspecified")
def an_id_without_a_barrier():
  def body(x_hbm, o_hbm):
    pltpu.sync_copy(x_hbm, o_hbm)

  return _on_core(body, _type(8, 128), cores=2, collective_id=3)


@_case(r"operation scan needs kernels whose vectors", "needs_layout_passes")
def a_running_sum_with_layout_passes():
  def body(x_hbm, o_hbm, buffer):
    pltpu.sync_copy(x_hbm, buffer)
    buffer[...] = plsc.cumsum(buffer[...])
    pltpu.sync_copy(buffer, o_hbm)

  return _on_subcores(body, _type(8), scratch=[pltpu.VMEM((8,), _F32)])


@_case(r"one of the shapes \[\(8,\)\]; got \(16,\)", "Get only supports")
def a_vector_of_a_bad_shape_on_a_subcore():
  def body(x_hbm, o_hbm, buffer):
    buffer[pl.ds(0, 16)] = buffer[pl.ds(0, 16)] + 1

  scratch = [pltpu.VMEM((64,), _F32)]
  x = _type(64)
  return _on_subcores(body, x, scratch=scratch, needs_layout_passes=False)


@_case(r"subcore loads vectors from VMEM, not scalars", "loading scalars")
def a_scalar_on_a_subcore():
  def body(x_hbm, o_hbm, buffer):
    buffer[0] = buffer[1] + 1

  return _on_subcores(body, _type(64), scratch=[pltpu.VMEM((64,), _F32)])


@_case(r"subcore computes on its own memory", "loading from HBM")
def a_load_from_hbm_on_a_subcore():
  def body(x_hbm, o_hbm):
    o_hbm[pl.ds(0, 8)] = x_hbm[pl.ds(0, 8)]

  return _on_subcores(body, _type(8))


@_case(r"copies nothing from HBM to its SMEM", "does not support transfers")
def a_copy_to_smem_on_a_subcore():
  x = _type(128, dtype=_I32)
  return _on_subcores(_through, x, scratch=[pltpu.SMEM(x.shape, _I32)])


# --- the cases, against the compiler ---------------------------------------


@functools.cache
def _failure(name: str) -> CompileError:
  make, _, _, chip = _CASES[name]
  with (
    jax.numpy_dtype_promotion("standard"),
    jax.numpy_rank_promotion("allow"),
    jax.enable_x64("64" in name),
  ):
    fn, args = make()
    with pytest.raises(CompileError) as caught:
      cm.compile(fn, *args, chip=chip)
  return caught.value


@pytest.mark.parametrize("name", _CASES)
def test_the_compilers_refusal_names_the_rule(name):
  _, rule, said, _ = _CASES[name]
  error = _failure(name)
  assert re.search(rule, error.rule), error
  assert said in error.original
  assert str(error).startswith(f"{error.rule} {error.advice}")
  assert str(error).endswith(error.original)


def _lines(fn) -> range:
  lines, first = inspect.getsourcelines(fn)
  return range(first, first + len(lines))


@pytest.mark.parametrize(
  "name", sorted(set(_CASES) - {"a_program_larger_than_hbm"})
)
def test_the_compilers_refusal_names_the_users_line(name):
  source = _failure(name).source
  assert source is not None and source.startswith(f"{__file__}:")
  line = int(source.removeprefix(f"{__file__}:").partition(" ")[0])
  users = (_CASES[name][0], _through, _copy, _transpose, _by_indices)
  assert any(line in _lines(fn) for fn in users), source


def _sums(x_hbm, o_hbm, first, second):
  pltpu.sync_copy(x_hbm, first.at[:8])
  second[...] = first[:8192] * 2
  pltpu.sync_copy(second.at[:8], o_hbm)


def test_buffers_that_fit_only_one_by_one_are_refused_before_libtpu(
  monkeypatch,
):
  """libtpu takes more than five minutes to say so of whole buffers."""
  monkeypatch.setattr(workers, "pool", None)
  sizes = [(16384, 1024), (8192, 1024)]
  fn, args = _on_core(
    _sums, _type(8, 1024), scratch=[pltpu.VMEM(s, _F32) for s in sizes]
  )
  with pytest.raises(
    CompileError, match=r"96\.00M are needed.*64\.00M"
  ) as found:
    cm.compile(fn, *args, chip="v5p")
  assert "first 64.00M, second 32.00M" in found.value.original
  # A v5e has 128 MiB, so that libtpu is asked.
  with pytest.raises(TypeError):
    cm.compile(fn, *args, chip="v5e")


def test_a_message_without_a_kernel_names_no_line():
  assert _failure("a_program_larger_than_hbm").source is None


def test_an_operation_on_memory_is_not_taken_for_one_on_elements():
  said = (
    "error: failed to legalize operation 'sc_tpu.enqueue_other_transfer':"
    ' "sc_tpu.enqueue_other_transfer"(%1) <{add = false}> :'
    " (memref<64x100xf32, #tpu.tiled<(8,128),[1,1]>, #tpu.memory_space<hbm>>)"
  )
  assert not failures.explain(said).is_known


def test_a_message_that_is_not_in_the_table_is_passed_on_as_it_is():
  found = failures.explain("INTERNAL: something new")
  assert not found.is_known and "no explanation" in found.advice


@pytest.mark.parametrize("name", sorted(_CASES))
def test_the_case_is_explained_by_its_own_row(name):
  error = _failure(name)
  if error.original.startswith(("nothing", "not asked")):
    return  # libtpu said nothing, so that there is nothing to look up.
  found = failures.explain(error.original)
  assert found.is_known and found.rule == error.rule


def test_the_advice_helps():
  """What the advice says to change is changed, and the kernel compiles."""

  def scan(x_hbm, o_hbm, buffer):
    pltpu.sync_copy(x_hbm, buffer)
    buffer[...] = plsc.cumsum(buffer[...])
    pltpu.sync_copy(buffer, o_hbm)

  def aligned(x_hbm, o_hbm, buffer):
    start = pl.multiple_of(jax.lax.axis_index("core") * 128, 128)
    _through(x_hbm.at[:, pl.ds(start, 128)], o_hbm, buffer)

  x = _type(8, 128)
  for fn, args in (
    _on_subcores(
      scan,
      _type(8),
      scratch=[pltpu.VMEM((8,), _F32)],
      needs_layout_passes=False,
    ),
    _on_core(
      aligned,
      _type(8, 512),
      out=x,
      scratch=[pltpu.VMEM(x.shape, _F32)],
      cores=2,
    ),
    _call(
      _transpose,
      _type(512, 512),
      compiler_params=pltpu.CompilerParams(vmem_limit_bytes=4 * 2**20),
    ),
    _gather(128),
  ):
    assert cm.compile(fn, *args, chip="v5p").code_bytes


def test_an_error_of_the_compiler_can_be_pickled():
  error = _failure("a_sort")
  again = pickle.loads(pickle.dumps(error))
  assert str(again) == str(error) and again.rule == error.rule
