"""The choice of blocks of kernels.matmul: table, model, and what fits."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import coremesh as cm
from coremesh.kernels._matmul import choice, launch, memory, streams
from coremesh.kernels._matmul import table as matmul_table
from coremesh.kernels._matmul.blocks import Blocks, Product
from coremesh.kernels.matmul import SPEC

_V5P = cm.chip("v5p")
_PRODUCT = Product(batch=1, rows=256, columns=512, inner=384)
_ROW = (64, 128, 384, "columns", None)


@pytest.fixture
def _one_row(monkeypatch):
  table = {matmul_table.key(_PRODUCT, _V5P): _ROW}
  monkeypatch.setattr(matmul_table, "BLOCKS", table)


def test_a_row_of_the_table_is_taken_first(_one_row):
  rows, columns, inner, split, part = _ROW
  want = Blocks(rows=rows, columns=columns, inner=inner, split=split, part=part)
  assert choice.choose(_PRODUCT, _V5P) == want
  # Operands of an epilogue leave the best blocks as they are.
  bias = dataclasses.replace(_PRODUCT, operand_bytes=4)
  assert choice.choose(bias, _V5P) == want


@pytest.mark.parametrize(
  "changes",
  [
    dict(batch=2),
    dict(rows=512, columns=256),
    dict(inner=512),
    dict(num_weights=2),
    dict(dtype="float16"),
    dict(out_dtype="float32"),
    dict(transpose_x=True),
    dict(transpose_w=True),
  ],
  ids=str,
)
def test_a_row_is_of_one_product_only(_one_row, changes):
  other = dataclasses.replace(_PRODUCT, **changes)
  assert choice.tabulated(other, _V5P) is None


def test_a_row_is_of_one_chip_and_one_version_of_the_kernel(
  _one_row, monkeypatch
):
  assert choice.tabulated(_PRODUCT, _V5P) is not None
  for name in ("v5e", "v6e", "tpu7x"):
    assert choice.tabulated(_PRODUCT, cm.chip(name)) is None
  monkeypatch.setattr(matmul_table, "VERSION", matmul_table.VERSION + 1)
  assert choice.tabulated(_PRODUCT, _V5P) is None


def test_a_row_that_does_not_fit_is_not_taken(monkeypatch):
  product = Product(batch=1, rows=8192, columns=8192, inner=8192)
  key = matmul_table.key(product, _V5P)
  table = {key: (8192, 8192, 8192, "rows", None)}
  monkeypatch.setattr(matmul_table, "BLOCKS", table)
  chosen = choice.choose(product, _V5P)
  assert chosen == choice.best(product, _V5P, count=1)[0]


def test_the_rows_of_the_table_are_those_of_cases_and_fit():
  chips = {name: cm.chip(name) for name in ("v5p", "v6e", "tpu7x")}
  found = set()
  for chip in chips.values():
    for case in SPEC.cases.values():
      product = launch.product_of_types(*case.args, **case.options)
      blocks = choice.tabulated(product, chip)
      if blocks is not None:
        assert memory.fits(product, blocks, chip)
        found.add(matmul_table.key(product, chip))
  assert found == set(matmul_table.BLOCKS)


@pytest.mark.parametrize("inner", [1, 128, 300, 2048, 100_000])
@pytest.mark.parametrize("rows", [8, 1024])
def test_first_chunks_are_the_first_block(inner, rows):
  product = Product(batch=1, rows=rows, columns=4096, inner=inner)
  blocks = Blocks(rows=rows, columns=512, inner=4096)
  chunks = streams.first_chunks(product, blocks, _V5P)
  assert chunks[0] == 128 or len(chunks) == 1
  assert all(chunk % 128 == 0 for chunk in chunks)
  whole = min(4096, -(-inner // 128) * 128)
  assert sum(chunks) == whole


def test_clipped_blocks_are_those_inside_the_arrays():
  product = Product(batch=1, rows=100, columns=700, inner=300)
  blocks = Blocks(rows=512, columns=1024, inner=1024, part=512)
  want = Blocks(rows=112, columns=1024, inner=384, part=512)
  assert choice.clipped(product, blocks) == want
  narrow = dataclasses.replace(product, columns=500)
  whole = choice.clipped(narrow, blocks)
  assert (whole.columns, whole.part) == (512, None)


def test_what_is_tabulated_is_found_by_the_launch():
  types = [
    jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((250, 130), (130, 9))
  ]
  product = launch.product_of_types(*types, transpose_x=False)
  # Both lie transposed in HBM, and are taken so.
  assert product.transpose_x
  assert product.transpose_w
  assert product.row_tile == 128


def test_blocks_leave_room_for_what_is_spilled():
  chip = cm.chip("v5p:2x2x1")
  bare = Product(batch=1, rows=8192, columns=8192, inner=8192)
  block = Blocks(rows=2048, columns=1024, inner=1024)
  assert memory.fits(bare, block, chip)
  # Without strips, and more so with an epilogue, more is on the way at once.
  odd = dataclasses.replace(bare, rows=8200)
  fused = dataclasses.replace(bare, has_epilogue=True)
  spilled = [memory.spilled_bytes(p, block, chip) for p in (bare, odd, fused)]
  assert spilled[0] < spilled[1] < spilled[2]
  assert not memory.fits(odd, block, chip)
  small = dataclasses.replace(block, part=256)
  assert memory.fits(odd, small, chip)
  most = chip.vmem_bytes_per_tensor_core
  limit = memory.vmem_limit_bytes
  assert limit(most // 2, chip) < limit(most // 2, chip, spilled_bytes=most)
  assert limit(most // 2, chip, spilled_bytes=most) == most


def test_long_products_of_few_columns_have_room():
  # Of keys and values of many heads.
  x, w = (
    jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((4096, 4096), (4096, 1024))
  )
  product = launch.product_of_types(x, w)
  chosen = choice.choose(product, _V5P)
  needed = memory.vmem_bytes(product, chosen, _V5P)
  spilled = memory.spilled_bytes(product, chosen, _V5P)
  assert needed + spilled <= _V5P.vmem_bytes_per_tensor_core


def test_bare_products_of_whole_blocks_leave_in_strips():
  product = Product(batch=1, rows=1024, columns=256, inner=128)
  block = Blocks(rows=512, columns=256, inner=128)
  assert streams.num_strips(product, block, _V5P) == 2
  low = dataclasses.replace(block, rows=256)
  assert streams.num_strips(product, low, _V5P) == 1
  for change in (dict(rows=1000), dict(has_epilogue=True)):
    other = dataclasses.replace(product, **change)
    assert streams.num_strips(other, block, _V5P) == 1
