"""What a kernel author asks of a TPU: cores, memories, rates, meshes."""

from collections.abc import Sequence
import dataclasses
import math
import os
import re
from typing import Literal

import jax
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc
import numpy as np

from coremesh import _compat, chip_facts, errors, generations, topology

type Place = Literal["tpu", "simulator", "compiler"]

_DEFAULT_CHIP = "v5p:2x2x1"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Chip(chip_facts.ChipFacts):
  """A slice of TPU chips of one generation, attached or not.

  Make one with `cm.chip`. Equal names give equal values. A *device* is a JAX
  device: a whole chip on v4, v5e, v5p and v6e, half a chip on tpu7x. Numbers
  are those of `jax.experimental.pallas.tpu.get_tpu_info_for_chip`, with their
  unit and denominator put in the name; a rate the table does not have is None.

  Attributes:
    generation: "v4", "v5e", "v5p", "v6e" or "tpu7x".
    topology: chips along each axis of the slice.
  """

  def device_mesh(
    self,
    axis_names: str | Sequence[str] = "device",
    shape: Sequence[int] | None = None,
    *,
    on: Place | None = None,
    devices: Sequence[jax.Device] | np.ndarray | None = None,
    axis_types: Sequence[jax.sharding.AxisType] | None = None,
  ) -> jax.sharding.Mesh:
    """A `jax.sharding.Mesh` of this slice's devices, for `jax.shard_map`.

    Args:
      axis_names: one name, or one for each axis of `shape`.
      shape: devices along each axis; needed for more than one axis. Its
        product must be `num_devices`, or the number of `devices`.
      on: "tpu" for attached devices; "simulator" for CPU devices that stand in
        for them; "compiler" for devices that only compile. Default: "tpu" if
        this process computes on TPUs, else "simulator".
      devices: these devices in this order, instead of all of the slice.
      axis_types: as for `jax.make_mesh`; default all `Auto`.

    Returns:
      The mesh. On the simulator it tells the tracer that its devices are of
      this chip, and JAX has been asked for enough CPU devices if it had not
      started yet.

    Raises:
      ChipError: the shape does not hold the devices, JAX has started with too
        few of them, or they or the attached TPU are of another kind.
      UnsupportedError: explicit axes on the simulator.
    """
    names = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names)
    place = on or ("tpu" if topology.tpu_is_attached() else "simulator")
    if place not in ("tpu", "simulator", "compiler"):
      raise errors.ChipError(
        f"on must be 'tpu', 'simulator', 'compiler' or None; got {place!r}."
      )
    given = None if devices is None else list(np.ravel(np.array(devices)))
    count = self.num_devices if given is None else len(given)
    sizes = _check_mesh_shape(names, shape, count, self.name)
    types = None if axis_types is None else tuple(axis_types)
    if given is not None:
      self._check_given_devices(given, place)
    if place == "simulator":
      self._check_simulated_axis_types(types, len(sizes))
      return topology.arrange_simulated(
        topology.simulated_devices(count) if given is None else given,
        sizes,
        names,
        device_kind=self.device_kind,
        num_cores=self.tensor_cores_per_device,
      )
    if given is not None:
      return jax.sharding.Mesh(np.array(given).reshape(sizes), names, types)
    if place == "compiler":
      found = self._compile_only_devices()
    else:
      found = self._attached_devices()
    return topology.arrange(found, sizes, names, types)

  def tensor_cores(
    self, axis_name: str = "core", num_cores: int | None = None
  ) -> pltpu.TensorCoreMesh:
    """The TensorCores of one device, as a mesh for `cm.kernel`.

    Args:
      axis_name: the name of the core axis inside the kernel.
      num_cores: how many of the device's TensorCores; default all.

    Raises:
      ChipError: more cores than a device of this chip has. (libtpu compiles
        such a mesh without a word.)
    """
    have = self.tensor_cores_per_device
    count = _check_count("num_cores", num_cores, have, "TensorCores", self.name)
    return pltpu.TensorCoreMesh(axis_name=axis_name, num_cores=count)

  def vector_subcores(
    self,
    core_axis_name: str = "core",
    subcore_axis_name: str = "subcore",
    *,
    num_cores: int | None = None,
    num_subcores: int | None = None,
  ) -> plsc.VectorSubcoreMesh:
    """The vector subcores of one device's SparseCores, as a mesh.

    Args:
      core_axis_name: the name of the SparseCore axis inside the kernel.
      subcore_axis_name: the name of the subcore axis inside the kernel.
      num_cores: how many SparseCores; default all of the device.
      num_subcores: how many subcores of each; default all.

    Raises:
      ChipError: more than the chip has, or the chip has no SparseCore.
    """
    cores, subcores = (
      self.sparse_cores_per_device,
      self.vector_subcores_per_sparse_core,
    )
    what = "SparseCores"
    count = _check_count("num_cores", num_cores, cores, what, self.name)
    what = "vector subcores a SparseCore"
    sub = _check_count("num_subcores", num_subcores, subcores, what, self.name)
    with self._tracing_context():
      return plsc.VectorSubcoreMesh(
        core_axis_name=core_axis_name,
        subcore_axis_name=subcore_axis_name,
        num_cores=count,
        num_subcores=sub,
      )

  def scalar_subcores(
    self, axis_name: str = "core", num_cores: int | None = None
  ) -> plsc.ScalarSubcoreMesh:
    """The scalar subcores (sequencers) of one device's SparseCores.

    Args:
      axis_name: the name of the SparseCore axis inside the kernel.
      num_cores: how many SparseCores; default all of the device. libtpu takes
        one or all of them.

    Raises:
      ChipError: more than the chip has, a number in between, or the chip has
        no SparseCore.
    """
    have = self.sparse_cores_per_device
    count = _check_count("num_cores", num_cores, have, "SparseCores", self.name)
    if 1 < count < have:
      raise errors.ChipError(
        f"num_cores must be 1 or {have} on {self.name}: the compiler accepts"
        " a mesh of one scalar subcore or of all of them; got"
        f" {count}."
      )
    with self._tracing_context():
      return plsc.ScalarSubcoreMesh(axis_name=axis_name, num_cores=count)

  def _tracing_context(self):
    return _compat.empty_device_context(self.abstract_device(platform="cpu"))

  def abstract_device(self, *, platform: str) -> jax.sharding.AbstractDevice:
    """What the tracer needs to know of a device of this chip."""
    return _compat.AbstractDevice(
      device_kind=self.device_kind,
      num_cores=self.tensor_cores_per_device,
      platform=platform,
    )

  def _compile_only_devices(self) -> list[jax.Device]:
    return topology.compile_only_devices(
      self.name, megacore=self.version.supports_megacore
    )

  def _attached_devices(self) -> list[jax.Device]:
    devices = jax.devices()
    kinds = {d.device_kind for d in devices}
    if {_compat.chip_version(k) for k in kinds} != {self.version}:
      raise errors.ChipError(
        f"This process computes on {sorted(kinds)}, not on {self.name}. Use"
        " cm.chip() for the attached chip, or on='simulator' or on='compiler'"
        f" for {self.name}."
      )
    if len(devices) != self.num_devices:
      raise errors.ChipError(
        f"{self.name} has {self.num_devices} devices, but {len(devices)} are"
        " attached. Use cm.chip() for the attached slice, or pass devices=."
      )
    return devices

  def _check_given_devices(self, devices, place) -> None:
    if place == "simulator":
      fits, what = {d.platform for d in devices} == {"cpu"}, "CPU devices"
    else:
      versions = {_compat.chip_version(d.device_kind) for d in devices}
      fits, what = versions == {self.version}, f"{self.generation} devices"
    if not fits:
      kinds = sorted({d.device_kind for d in devices})
      raise errors.ChipError(
        f"devices must be {what} for on={place!r}; got {kinds}."
      )

  def _check_simulated_axis_types(self, axis_types, num_axes: int) -> None:
    all_auto = (jax.sharding.AxisType.Auto,) * num_axes
    if axis_types not in (None, all_auto):
      raise errors.UnsupportedError(
        "axis_types must be all Auto on the simulator: JAX builds the output"
        " sharding of explicit axes from the CPU devices and loses the"
        f" simulated chip; got {axis_types}. Leave axis_types out."
      )


def chip(name: str | None = None) -> Chip:
  """A TPU slice by name, or the one this program should use.

  Args:
    name: a generation and chips along each axis, such as "v5p:2x2x1" (4
      chips), "v6e:2x2" or "tpu7x:2x2x1"; the generation alone is one host of
      it. None: the attached TPU if there is one; else the value of the
      environment variable `COREMESH_CHIP`; else "v5p:2x2x1".

  Returns:
    The slice, whether or not it is attached.

  Raises:
    ChipError: no such chip, or a topology that is not one.

  Example:
    >>> chip = cm.chip("v5p:2x2x1")
    >>> chip.num_devices, chip.tensor_cores_per_device
    (4, 2)
  """
  if name is None:
    if topology.tpu_is_attached():
      return _attached_chip()
    name = os.environ.get("COREMESH_CHIP") or _DEFAULT_CHIP
  if not isinstance(name, str):
    raise errors.ChipError(
      f"name must be a string such as 'v5p:2x2x1'; got {name!r}."
    )
  generation, colon, dims = name.strip().lower().partition(":")
  generation = {"7x": "tpu7x", "v7x": "tpu7x"}.get(generation, generation)
  if generation not in generations.FAMILIES:
    raise errors.ChipError(generations.unknown(name))
  one_host = generations.FAMILIES[generation].one_host
  if not colon:
    return Chip(generation=generation, topology=one_host)
  if not re.fullmatch(r"\d+(x\d+)*", dims):
    raise errors.ChipError(
      f"The topology of {name!r} must be chips along each axis, such as"
      f" {generation}:{generations.format_topology(one_host)}; got {dims!r}."
    )
  sizes = tuple(int(n) for n in dims.split("x"))
  missing = len(one_host) - len(sizes)
  return Chip(generation=generation, topology=sizes + (1,) * missing)


def chip_of_device_kind(device_kind: str) -> Chip | None:
  """A one-host slice of the chip a JAX device kind names, None if no TPU."""
  version = _compat.chip_version(device_kind)
  for generation, family in generations.FAMILIES.items():
    if version is not None and family.version == version:
      return Chip(generation=generation, topology=family.one_host)
  return None


def _attached_chip() -> Chip:
  devices = jax.devices()
  one_host = chip_of_device_kind(devices[0].device_kind)
  if one_host is None:
    raise errors.ChipError(
      f"The attached TPU is a {devices[0].device_kind!r}, which coremesh does"
      f" not know; it knows {', '.join(generations.FAMILIES)}."
    )
  coords = [d.coords for d in devices]
  box = tuple(len({c[i] for c in coords}) for i in range(len(coords[0])))
  return dataclasses.replace(one_host, topology=box[: len(one_host.topology)])


def _check_count(
  argument: str, asked: int | None, have: int, what: str, name: str
) -> int:
  if have == 0:
    raise errors.ChipError(f"{name} has no {what}.")
  if asked is None:
    return have
  if isinstance(asked, bool) or not isinstance(asked, int):
    raise errors.ChipError(f"{argument} must be an int; got {asked!r}.")
  if not 1 <= asked <= have:
    raise errors.ChipError(
      f"{argument} must be from 1 to {have}: a device of {name} has {have}"
      f" {what}; got {asked}."
    )
  return asked


def _check_mesh_shape(
  names: tuple[str, ...],
  shape: Sequence[int] | None,
  count: int,
  name: str,
) -> tuple[int, ...]:
  if len(set(names)) != len(names) or not names:
    raise errors.AxisError(
      f"axis_names must be one or more different names; got {names}."
    )
  if shape is None:
    if len(names) > 1:
      raise errors.ChipError(
        f"shape is needed for the axes {names}: the devices along each, with"
        f" product {count} for {name}."
      )
    return (count,)
  sizes = tuple(shape) if isinstance(shape, Sequence) else (shape,)
  fits = len(sizes) == len(names) and chip_facts.all_counts(sizes)
  if not fits or math.prod(sizes) != count:
    raise errors.ChipError(
      f"shape must have one size for each axis of {names} and hold the"
      f" {count} devices of {name}; got {shape}."
    )
  return sizes
