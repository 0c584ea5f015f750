"""What a core may load from and store to: the rules of the TPU compiler.

They are those by which JAX's Mosaic lowering refuses `ref[...]`; here they
are told before anything runs. DMAs reach every memory.
"""

from typing import Any

from coremesh import _compat, errors
from coremesh._compat import kernel_ir
from coremesh.simulate import access, emitter

_FAR = {"hbm": "HBM", "host": "the host's memory"}


def check(em: emitter.Emitter, part: access.Part, site: Any) -> None:
  """Checks that the core of this program may load, or store, a part of a ref.

  Raises:
    UnsupportedError: only a DMA reaches that memory, or the core has no such
      load or store.
  """
  declaration = part.declaration
  if _compat.memory_space_of_type(declaration.type) is None:
    return  # `jax.new_ref` of an array, which may be in any memory.
  if any(
    isinstance(t, kernel_ir.SharedSliceTransform) for t in part.transforms
  ):
    return  # The subcore's own VMEM, as a part of what all of them share.
  far = dict(_FAR)
  if em.is_sparse:
    far["vmem_shared"] = "the VMEM that subcores share"
  if memory := far.get(declaration.space):
    raise errors.UnsupportedError(
      f"{em.constants[str(site)]}: {declaration.name!r} is in {memory}, and a"
      " core loads from and stores to its own VMEM and SMEM only. Copy it there"
      " first: cm.copy, pltpu.sync_copy or a pipeline."
    )
  type_ = kernel_ir.transformed_type(declaration.type, part.transforms)
  if kernel_ir.is_key(type_.dtype):
    return
  if declaration.space == "smem" and type_.shape:
    raise errors.UnsupportedError(
      f"{em.constants[str(site)]}: {declaration.name!r} is in SMEM, where a"
      " core loads and stores one number at a time; this has the shape"
      f" {type_.shape}. Index it, or keep it in VMEM."
    )
  if declaration.space == "vmem" and em.is_sparse and not type_.shape:
    raise errors.UnsupportedError(
      f"{em.constants[str(site)]}: {declaration.name!r} is in VMEM, where a"
      " vector subcore loads and stores registers, not single numbers. Load a"
      " register and take an element, v = ref[pl.ds(i, lanes)]; v[0], or keep"
      " the numbers in SMEM."
    )
