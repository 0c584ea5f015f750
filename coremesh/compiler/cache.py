"""Compiled programs on disk, shared by all processes of a user.

An entry is a file: a line with the format and the digest of what follows, then
compressed JSON. It is written beside its place and renamed into it, so that a
reader sees a whole entry or none.
"""

from collections.abc import Mapping
import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import tempfile
import time
from typing import Any
import warnings
import zlib

DEFAULT_MOST_BYTES = 2 * 2**30
_FORMAT = b"coremesh-compiled-1"
_SUFFIX = ".compiled"
_ABANDONED_SECONDS = 3600.0


class CacheWarning(UserWarning):
  """An entry could not be read or written; the program was compiled."""


def default_folder() -> pathlib.Path:
  """`COREMESH_CACHE_DIR`, or coremesh's place in the user's cache folder."""
  if named := os.environ.get("COREMESH_CACHE_DIR"):
    return pathlib.Path(named)
  home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  return pathlib.Path(home) / "coremesh" / "compiled"


def key(parts: Mapping[str, bytes | str]) -> str:
  """The name of an entry: a digest of all that decides what it holds."""
  digest = hashlib.sha256(_FORMAT)
  for name in sorted(parts):
    value = parts[name]
    data = value.encode() if isinstance(value, str) else value
    digest.update(f"\n{name} {len(data)}\n".encode())
    digest.update(data)
  return digest.hexdigest()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
  """What a cache holds.

  Attributes:
    entries: how many programs.
    num_bytes: what their files take.
    oldest_seconds: how long ago the least recently used was used; None if
      there is none.
  """

  entries: int
  num_bytes: int
  oldest_seconds: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cache:
  """A folder of entries, the least recently used of which make room.

  Attributes:
    folder: where; made when first written to.
    most_bytes: what the files may take together.
  """

  folder: pathlib.Path = dataclasses.field(default_factory=default_folder)
  most_bytes: int = DEFAULT_MOST_BYTES

  def get(self, name: str) -> Any | None:
    """What was put under a key, or None. A corrupt entry warns and goes."""
    path = self._path(name)
    try:
      data = path.read_bytes()
    except FileNotFoundError:
      return None
    except OSError as error:
      self._warn(f"cannot read {path}: {error}")
      return None
    try:
      value = _decoded(data)
    except (ValueError, zlib.error) as error:
      self._warn(
        f"the entry {path} is corrupt ({error}); the program is compiled again"
      )
      with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
      return None
    with contextlib.suppress(OSError):  # Another process may have removed it.
      os.utime(path)
    return value

  def put(self, name: str, value: Any) -> None:
    """Keeps a value that JSON can hold; warns if the disk does not take it."""
    data = _encoded(value)
    if len(data) > self.most_bytes:
      return
    try:
      self.folder.mkdir(parents=True, exist_ok=True)
      self._write(self._path(name), data)
      self._make_room()
    except OSError as error:
      self._warn(f"cannot keep a compiled program in {self.folder}: {error}")

  def contents(self) -> Contents:
    """How many entries there are, and what they take."""
    found = self._entries()
    oldest = min((used for used, _, _ in found), default=None)
    return Contents(
      entries=len(found),
      num_bytes=sum(size for _, size, _ in found),
      oldest_seconds=None if oldest is None else time.time() - oldest,
    )

  def clear(self) -> Contents:
    """Removes all entries; returns what there was."""
    before = self.contents()
    for _, _, path in self._entries():
      path.unlink(missing_ok=True)
    self._sweep(0.0)
    return before

  def _path(self, name: str) -> pathlib.Path:
    return self.folder / f"{name}{_SUFFIX}"

  def _write(self, path: pathlib.Path, data: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(".part", dir=self.folder)
    try:
      with os.fdopen(descriptor, "wb") as file:
        file.write(data)
      os.replace(temporary, path)
    except BaseException:
      with contextlib.suppress(OSError):
        os.unlink(temporary)
      raise

  def _entries(self) -> list[tuple[float, int, pathlib.Path]]:
    """When each entry was last used, its size and its file, oldest first."""
    found = []
    for path in self.folder.glob(f"*{_SUFFIX}"):
      with contextlib.suppress(FileNotFoundError):
        status = path.stat()
        found.append((status.st_mtime, status.st_size, path))
    return sorted(found)

  def _make_room(self) -> None:
    self._sweep(_ABANDONED_SECONDS)
    entries = self._entries()
    total = sum(size for _, size, _ in entries)
    for _, size, path in entries:
      if total <= self.most_bytes:
        return
      path.unlink(missing_ok=True)
      total -= size

  def _sweep(self, seconds: float) -> None:
    """Removes what a killed process was writing."""
    for path in self.folder.glob("*.part"):
      with contextlib.suppress(FileNotFoundError):
        if time.time() - path.stat().st_mtime >= seconds:
          path.unlink()

  def _warn(self, text: str) -> None:
    warnings.warn(f"coremesh's cache: {text}.", CacheWarning, stacklevel=4)


def _encoded(value: Any) -> bytes:
  body = zlib.compress(json.dumps(value).encode(), level=3)
  return _header(body) + body


def _decoded(data: bytes) -> Any:
  end = data.find(b"\n") + 1
  header, body = data[:end], data[end:]
  if header != _header(body):
    raise ValueError("its digest is not that of what it holds")
  return json.loads(zlib.decompress(body))


def _header(body: bytes) -> bytes:
  return b"%s %s\n" % (_FORMAT, hashlib.sha256(body).hexdigest().encode())
