"""A process that holds libtpu and compiles what it is sent."""

from multiprocessing import connection
import os
import pathlib
import pickle
import shutil
import threading
import time
import traceback
from typing import Any

import jax

from coremesh import errors, topology
from coremesh._compat import aot
from coremesh.compiler import dumps

_LARGE_TEXT = 16_000_000


def main(reader: int, writer: int, parent: int, folder: str) -> None:
  """Answers requests until there are no more, or the parent has ended.

  Args:
    reader: file descriptor the requests come from.
    writer: file descriptor the answers go to.
    parent: the process that sends the requests.
    folder: where libtpu writes; removed at the end.
  """
  threading.Thread(target=_end_with, args=(parent, folder), daemon=True).start()
  requests = connection.Connection(reader, writable=False)
  answers = connection.Connection(writer, readable=False)
  while True:
    try:
      request = pickle.loads(requests.recv_bytes())
    except EOFError:
      shutil.rmtree(folder, ignore_errors=True)
      return
    answers.send_bytes(pickle.dumps(_answer(request, pathlib.Path(folder))))


def _end_with(parent: int, folder: str) -> None:
  while os.getppid() == parent:
    time.sleep(0.2)
  shutil.rmtree(folder, ignore_errors=True)
  os._exit(1)


def _answer(request: dict[str, Any], folder: pathlib.Path) -> dict[str, Any]:
  try:
    return _compiled(request, folder)
  except jax.errors.JaxRuntimeError as error:
    return {"refused": str(error)}
  except errors.ChipError as error:
    return {"no_chip": str(error)}
  except Exception:
    return {"failed": traceback.format_exc()}
  finally:
    dumps.clear(folder)


def _compiled(request: dict[str, Any], folder: pathlib.Path) -> dict[str, Any]:
  dumps.clear(folder)
  if request["topology"]:
    devices = aot.slice_of(request["topology"])
  else:
    chip, megacore = request["chip"]
    listed = topology.compile_only_devices(chip, megacore=megacore)
    devices = {d.id: d for d in listed}
  executable = aot.compile_module(
    request["module"], request["options"], devices, request["device_ids"]
  )
  hlo = aot.hlo_text(executable, constants=True)
  if len(hlo) > _LARGE_TEXT:
    hlo = aot.hlo_text(executable, constants=False)
  memory = executable.get_compiled_memory_stats()
  return {
    "texts": {"hlo": hlo} | dumps.module_texts(folder),
    "operations": [
      {"name": o.name, "kernel": o.kernel, "texts": dict(o.texts)}
      for o in dumps.collect(folder, hlo, aot.kernel_module)
    ],
    "memory": {
      name: value
      for name in dir(memory)
      if name.endswith("_in_bytes") and (value := getattr(memory, name)) >= 0
    },
    "costs": dict(_costs(executable)),
  }


def _costs(executable: Any) -> dict[str, float]:
  found = executable.cost_analysis()
  found = found[0] if isinstance(found, list) else found
  return {name: float(value) for name, value in (found or {}).items()}
