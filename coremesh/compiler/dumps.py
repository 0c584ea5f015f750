"""What libtpu writes while it compiles, read into texts by stage.

A worker names one folder to libtpu and compiles one program at a time, so that
what lies in the folder belongs to the program at hand.
"""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import pathlib
import re

# Writes the lines of the program as comments beside the machine code, which
# stays the same.
SOURCE_LINES = "--xla_mosaic_enable_llo_source_annotations=true"

# Files of a TensorCore program and of a kernel in it: number-name-number-pass.
_LLO_FILE = re.compile(r"(?P<group>\d+)-(?P<name>.+)-\d\d-(?P<stage>.+)\.txt")
_LLO_STAGES = {
  "packed-bundles-post-ra": "bundles",
  "schedule-analysis_packed-bundles-post-ra": "schedule",
}
_MOSAIC_FILE = re.compile(
  r"(?P<group>\d+)-\d{4}-mosaic-dump-(?P<name>.+?)-"
  r"(?P<stage>(?:sparsecore-|mosaic-)?(?:module-)?original|post-.+)\.txt"
)
_MOSAIC_STAGES = {
  # on a TensorCore
  "original": "mosaic",
  "post-apply-vector-layout-simplify": "mosaic-layouts",
  "post-finalize-llo": "llo",
  # on a SparseCore
  "mosaic-module-original": "mosaic",
  "post-mosaic-module-apply-vector-layout-cse": "mosaic-layouts",
  "post-mosaic-module-lower-to-mlo": "llo",
}
_SPARSECORE_FILE = re.compile(r"(?P<name>.+)_(?P<group>\d+)_bundles\.txt")

# Names of values, the main function, and where XLA has put an operand.
_ADDED = re.compile(
  r"%[\w#]+|tpu\.main, |#tpu\.memory_space<\w+>"
  r"|pipeline_mode = #tpu\.pipeline_mode<synchronous>, "
  r"| attributes \{tpu\.core_type = #tpu\.core_type<\w+>\}"
)

type _Reader = Callable[[str], tuple[str, str] | None]

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?(?P<name>[\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(
  r"^\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<rest>.*)", re.DOTALL
)
_CALLED = re.compile(r"(?:to_apply|calls)=%?([\w.\-]+)")
# In a fusion libtpu leaves the configuration of a kernel as it was given, with
# spaces.
_KERNEL_BODY = re.compile(
  r'"custom_call_config":\s*\{"body":\s*"([A-Za-z0-9+/=]+)"'
)
_KERNEL_CALL = 'custom_call_target="tpu_custom_call"'


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Texts:
  """The texts of one operation of a compiled program.

  Attributes:
    name: the HLO instruction, or what libtpu calls the program around all.
    kernel: the kernel it runs; None for an operation of XLA's.
    texts: by stage.
  """

  name: str
  kernel: str | None
  texts: Mapping[str, str]


def flags(folder: pathlib.Path) -> list[str]:
  """The flags of libtpu that make it write what `collect` reads."""
  for name in ("llo", "mosaic", "sparsecore"):
    (folder / name).mkdir(exist_ok=True)
  return [
    f"--xla_jf_dump_to={folder / 'llo'}",
    "--xla_jf_dump_llo_text=true",
    "--xla_jf_dump_llo_pass_label_regex=^packed-bundles-post-ra",
    f"--xla_mosaic_dump_to={folder / 'mosaic'}",
    f"--xla_sc_dump_bundles_to={folder / 'sparsecore'}",
    SOURCE_LINES,
  ]


def clear(folder: pathlib.Path) -> None:
  """Removes what was written."""
  for path in folder.glob("*/*"):
    path.unlink(missing_ok=True)


def collect(
  folder: pathlib.Path, hlo: str, kernel_module: _Reader
) -> list[Texts]:
  """Reads what libtpu wrote while it compiled one program.

  Args:
    folder: as given to `flags`.
    hlo: the compiled program, where kernels are called.
    kernel_module: name and text of a kernel from its base64 body.

  Returns:
    The operations in the order in which libtpu wrote their code; the program
    around them is "TLP". What Mosaic wrote names a kernel, not an instruction;
    of several kernels with one name it goes to the one whose program it is. If
    none is, "mosaic" is what the instruction says.

  Raises:
    ValueError: a kernel of the program has no machine code, or is not in it.
  """
  kernels = _kernels(hlo, kernel_module)
  found: dict[str, dict[str, str]] = {}
  for match, path in _files(folder / "llo", _LLO_FILE):
    stage = _LLO_STAGES.get(match["stage"])
    if stage:
      found.setdefault(match["name"], {})[stage] = _read(path)
  for match, path in _files(folder / "sparsecore", _SPARSECORE_FILE):
    found.setdefault(match["name"], {})["sparsecore"] = _read(path)
  mosaic = _mosaic(folder / "mosaic")
  operations = []
  for name, texts in found.items():
    kernel = kernels.get(name)
    if kernel is not None:
      texts = {"mosaic": kernel[1]} | _take(kernel, mosaic) | texts
    operations.append(
      Texts(name=name, kernel=kernel and kernel[0], texts=texts)
    )
  _check_kernels({k[0] for k in kernels.values()}, operations)
  return operations


def _check_kernels(kernels: set[str], operations: list[Texts]) -> None:
  """Every kernel must have machine code, or libtpu writes it elsewhere."""
  with_code = {
    o.kernel for o in operations if o.texts.keys() & {"bundles", "sparsecore"}
  }
  if missing := sorted(kernels - with_code):
    raise ValueError(
      f"libtpu wrote no machine code of {', '.join(missing)} where coremesh"
      " looks for it: files named *-packed-bundles-post-ra.txt or"
      " *_bundles.txt. The disk may be full, or libtpu of another version."
    )


def module_texts(folder: pathlib.Path) -> dict[str, str]:
  """Texts of the whole program: which buffer holds VMEM when, as HTML."""
  reports = sorted((folder / "llo").glob("*-vmem_report.html"))
  return {"vmem-report": _read(reports[-1])} if reports else {}


def statements(hlo: str) -> Iterator[str]:
  """The instructions of a module, and the lines that open a computation.

  An instruction spans lines if the metadata of its kernel do.
  """
  found: list[str] = []
  for line in hlo.splitlines():
    starts = _INSTRUCTION.match(line) or _COMPUTATION.match(line)
    if (starts or line == "}") and found:
      yield "\n".join(found)
      found = []
    found.append(line)
  yield "\n".join(found)


def _files(
  folder: pathlib.Path, pattern: re.Pattern[str]
) -> Iterator[tuple[re.Match[str], pathlib.Path]]:
  """The files of a pattern, in the order of their numbers: those of time."""
  found = [(pattern.fullmatch(p.name), p) for p in folder.iterdir()]
  matches = [(match, path) for match, path in found if match]
  yield from sorted(matches, key=lambda m: (int(m[0]["group"]), m[1].name))


def _read(path: pathlib.Path) -> str:
  return path.read_text(errors="replace")


def _mosaic(folder: pathlib.Path) -> list[tuple[str, dict[str, str]]]:
  """Name and texts of each kernel Mosaic compiled, in the order it did."""
  groups: dict[str, tuple[str, dict[str, str]]] = {}
  for match, path in _files(folder, _MOSAIC_FILE):
    if stage := _MOSAIC_STAGES.get(match["stage"]):
      _, texts = groups.setdefault(match["group"], (match["name"], {}))
      texts[stage] = _read(path)
  return list(groups.values())


def _take(
  kernel: tuple[str, str], mosaic: list[tuple[str, dict[str, str]]]
) -> dict[str, str]:
  """Takes the texts of a kernel out of Mosaic's; none if it is not certain."""
  name, program = kernel
  named = [m for m in mosaic if m[0] == name]
  same = [m for m in named if _essence(m[1]["mosaic"]) == _essence(program)]
  if not same and len(named) > 1:
    return {}
  for found in same or named:
    mosaic.remove(found)
    return found[1]
  return {}


def _essence(program: str) -> str:
  """A module without what libtpu adds to it before it writes it."""
  return re.sub(_ADDED, "", program).strip()


def _kernels(hlo: str, kernel_module: _Reader) -> dict[str, tuple[str, str]]:
  """The kernel that each HLO instruction runs, itself or in what it calls."""
  bodies: dict[str, str] = {}
  called: dict[str, list[str]] = {}
  inside: dict[str, list[str]] = {}
  computation = ""
  for line in statements(hlo):
    if match := _COMPUTATION.match(line):
      computation = match["name"]
    elif match := _INSTRUCTION.match(line):
      name, rest = match["name"], match["rest"]
      inside.setdefault(computation, []).append(name)
      called[name] = _CALLED.findall(rest)
      if body := _KERNEL_BODY.search(rest):
        bodies[name] = body[1]
      elif _KERNEL_CALL in rest:
        raise ValueError(
          f"The kernel of {name} is not where coremesh looks for it in the"
          " compiled program: libtpu may be of another version."
        )
  names = {name: kernel_module(body) for name, body in bodies.items()}

  def of(instruction: str) -> tuple[str, str] | None:
    if instruction in names:
      return names[instruction]
    inner = (i for c in called[instruction] for i in inside.get(c, ()))
    return next((kernel for i in inner if (kernel := of(i))), None)

  return {name: kernel for name in called if (kernel := of(name))}
