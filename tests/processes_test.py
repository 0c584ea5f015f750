"""Two processes under jax.distributed agree on everything they must."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).parent.parent

# Prints what this process sees as one line of JSON.
_PROGRAM = """
import json
import sys

import jax

rank, port = int(sys.argv[1]), sys.argv[2]
jax.distributed.initialize(
  f"127.0.0.1:{port}", num_processes=2, process_id=rank
)
import coremesh as cm
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

chip = cm.chip("v5p:2x2x1")
# Four devices, for which each process must offer two.
mesh = chip.device_mesh(("x", "y"), (2, 2))
wide = cm.chip("v5p:2x2x4").device_mesh(("x", "y"), (4, 4), on="compiler")
X = jax.ShapeDtypeStruct((256, 128), jnp.float32)


def kernel(wait):
  @cm.kernel(
    mesh=chip.tensor_cores(),
    out=cm.like(0),
    scratch=dict(mine=cm.vmem_slab(0)),
    name="double",
  )
  def double(x_hbm, o_hbm, *, mine):
    rows = cm.slab(x_hbm)
    cm.copy(x_hbm.at[rows], mine)
    wait()
    mine[...] = mine[...] * 2
    cm.copy(mine, o_hbm.at[rows])

  return double


def over(fn, mesh):
  spec = P(mesh.axis_names)
  return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec))


waits = dict(
  core=lambda: cm.core_barrier(),
  devices=lambda: cm.device_barrier(),
  everyone=lambda: cm.global_barrier(),
  ring=lambda: cm.neighbour_barrier("x"),
)
if rank == 1:  # What else one process traces must make no difference.
  over(kernel(lambda: cm.neighbour_barrier("y")), wide).trace(X)
  waits = dict(reversed(waits.items()))

compiled = {
  name: cm.compile(over(kernel(wait), wide), X) for name, wait in waits.items()
}
ids = {name: c.kernels[0].collective_id for name, c in compiled.items()}

local = chip.device_mesh("d", devices=jax.local_devices())
x = np.arange(64 * 128, dtype=np.float32).reshape(64, 128)
y = over(kernel(lambda: cm.global_barrier()), local)(x)

try:
  over(kernel(lambda: cm.core_barrier()), mesh).trace(X)
  error = None
except cm.UnsupportedError as e:
  error = str(e)

print(
  json.dumps(
    dict(
      ids=dict(sorted(ids.items())),
      code_bytes=min(c.code_bytes for c in compiled.values()),
      shape=dict(mesh.shape),
      devices=[d.id for d in mesh.devices.flat],
      processes=[d.process_index for d in mesh.devices.flat],
      wide_devices=[d.id for d in wide.devices.flat],
      hosts=len({d.process_index for d in wide.devices.flat}),
      local_devices=[d.process_index for d in local.devices.flat],
      num_local=jax.local_device_count(),
      is_right=bool((y == 2 * x).all()),
      error=error,
    )
  )
)
"""


def _free_port() -> int:
  with socket.socket() as listener:
    listener.bind(("127.0.0.1", 0))
    return listener.getsockname()[1]


def _start(rank: int, port: int) -> subprocess.Popen[str]:
  environment = os.environ | dict(
    JAX_PLATFORMS="cpu",
    PYTHONHASHSEED=str(rank + 1),
    PYTHONPATH=str(_ROOT),
  )
  return subprocess.Popen(
    [sys.executable, "-W", "error", "-c", _PROGRAM, str(rank), str(port)],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    env=environment,
    cwd=_ROOT,
  )


@pytest.fixture(scope="module")
def seen():
  """What each of the two processes saw."""
  port = _free_port()
  processes = [_start(rank, port) for rank in range(2)]
  try:
    outputs = [p.communicate(timeout=80) for p in processes]
  finally:
    for process in processes:
      process.kill()
  for process, (_, err) in zip(processes, outputs, strict=True):
    assert process.returncode == 0, err[-3000:]
  return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


def test_collective_ids_agree(seen):
  first, second = (s["ids"] for s in seen)
  assert first == second
  assert len(set(first.values())) == len(first) == 4


def test_device_meshes_agree(seen):
  for s in seen:
    assert s["shape"] == {"x": 2, "y": 2}
    assert s["processes"] == [0, 0, 1, 1]
    assert s["num_local"] == 2
  assert seen[0]["devices"] == seen[1]["devices"]
  assert seen[0]["wide_devices"] == seen[1]["wide_devices"]


def test_a_kernel_on_the_devices_of_one_process_runs_in_each(seen):
  for rank, s in enumerate(seen):
    assert s["local_devices"] == [rank, rank]
    assert s["is_right"]


def test_a_kernel_across_processes_needs_a_tpu_or_a_compile(seen):
  for s in seen:
    assert "'double' runs over a device mesh of 2 processes" in s["error"]
    assert "devices=jax.local_devices()" in s["error"]
    assert "Only a TPU runs it across processes" in s["error"]
    assert (
      'a compile checks it: chip.device_mesh(..., on="compiler")'
      in (s["error"])
    )


def test_a_kernel_for_many_hosts_compiles(seen):
  for s in seen:
    assert s["hosts"] == 4
    assert s["code_bytes"] > 1000
