"""Write under a temporary name first, so that the old content stays until the new one is complete."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import platform
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tpcompiler.errors import ArtifactError, explaining, option
from tpcompiler.runtime.opened import read_object

MANIFEST = "manifest.json"
SET = "programs.json"
CUT = ".cut.json"  # progress of an unfinished cut of weights
COMPILED, RUNNER = "compiled.pt2", "runner.so"  # a package, and the library that runs it from Python
# The files of an artifact, and of an interrupted cut of its weights.
PARTS = re.compile(
    r"manifest\.json|(rank|program)_\d+\.pt2|(program|model|whole|compiled(_\w+)?)\.pt2|runner\.so|(rank_\d+|values)\.safetensors"
)
PACKAGED = re.compile(r"compiled(_\w+)?\.pt2|runner\.so")
UNFINISHED = re.compile(r"\.cut\.json|\.rank_\d+\.safetensors\.part")
STREAMS = re.compile(r"/dev/std(out|err)|/dev/fd/\d+|/proc/[^/]+/fd/\d+")  # they may lead to files, but are not files
FIELDS = {MANIFEST: {"format", "mesh", "groups", "tensors", "collectives", "files"}, SET: {"format", "programs"}}


def free_target(directory: str | os.PathLike[str], *, force: bool = False) -> Path:
    """Return the directory as a path if an artifact may be written there; call it before the expensive work.

    Raises:
        ArtifactError: it exists, and `force` is not set or it is not just an artifact; or its parent folder cannot be
            written.
    """
    target = Path(os.path.abspath(directory)) if os.path.basename(directory) in ("", ".", "..") else Path(directory)
    refuse_strange_name(target)
    if os.path.lexists(target) and not force:
        raise ArtifactError(
            f"{target} exists already", help=f"choose another directory, or pass {option('--force', 'force=True')}"
        )
    with (
        explaining(f"cannot write {target}", "choose another directory"),
        contextlib.suppress(FileNotFoundError, NotADirectoryError),
    ):
        os.lstat(target)  # the name may be too long
    above = next(parent for parent in (*target.parents, Path()) if os.path.lexists(parent))
    if not os.path.isdir(above) or not os.access(above, os.W_OK):
        problem = "is not a directory" if not os.path.isdir(above) else "cannot be written"
        raise ArtifactError(f"cannot write {target}: {above} {problem}", help="choose another directory")
    if os.path.lexists(target):
        _refuse_others(target, target)
    return target


def refuse_strange_name(target: Path) -> None:
    """Raise ArtifactError for a path that is not text: torch's writer would end the process."""
    try:
        os.fspath(target).encode()
    except UnicodeEncodeError as error:
        raise ArtifactError(f"cannot write {target}: its name is not text", help="choose another directory") from error


@contextlib.contextmanager
def in_place_of(target: Path, *, force: bool) -> Iterator[Path]:
    """Yield a directory to write into, which replaces the target in the end. Only artifacts are replaced.

    Raises:
        ArtifactError: it cannot be written, or something that `free_target` rejects has appeared meanwhile.
    """
    above = [parent for parent in target.parents if not os.path.exists(parent)]
    with contextlib.ExitStack() as opened:
        opened.callback(_remove_empty, above)
        with explaining(f"cannot write {target}", "choose a directory that can be written"):
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = opened.enter_context(scratch_folder(target.parent, target.name))
        with explaining(f"cannot write {target}", "check the free space and the permissions"):
            temporary.chmod(0o755)  # that of an ordinary new directory
            yield temporary
            if os.path.lexists(target):
                free_target(target, force=force)
                _replace(temporary, target)
            else:
                _rename_to_free(temporary, target)


def _remove_empty(directories: Sequence[Path]) -> None:
    """Remove the empty directories that were made for nothing, innermost first."""
    for directory in directories:
        with contextlib.suppress(OSError):
            directory.rmdir()


@contextlib.contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Yield a path to write, which replaces the file in the end; a link is replaced, not followed.

    Devices and pipes are written directly. Raises OSError.
    """
    absolute = Path(os.path.abspath(file))
    if STREAMS.fullmatch(str(absolute)) or not _is_replaceable(file):
        yield file
        return
    with scratch_folder(absolute.parent, file.stem) as directory:
        temporary = directory / f"new{file.suffix}"
        yield temporary
        if not file.is_symlink() and file.exists():
            temporary.chmod(stat.S_IMODE(file.stat().st_mode))
        os.replace(temporary, file)


def refuse_full_disk(file: Path, size: int) -> None:
    """Check the free space first: torch's writer ends the process if the disk is full when it closes a file.

    Raises:
        OSError: the disk has too little space, or the file would exceed a limit.
    """
    with contextlib.suppress(ImportError):  # on Windows
        import resource

        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        if limit != resource.RLIM_INFINITY and limit < size:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), os.fspath(file))
    if shutil.disk_usage(file.parent).free < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(file))


def _is_replaceable(file: Path) -> bool:
    """Return True if there is nothing, a file, or a link to a file.

    Raises:
        PermissionError: the file may not be written, though its directory may.
    """
    try:
        regular = stat.S_ISREG(os.stat(file).st_mode)
    except FileNotFoundError:
        return True
    if regular and not os.access(file, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(file))
    return regular


def _refuse_others(directory: Path, target: Path) -> None:
    """Raise ArtifactError unless everything in the directory belongs to an artifact; messages name it `target`."""
    names = sorted(os.listdir(directory)) if os.path.isdir(directory) else []
    listing = SET if SET in names else MANIFEST
    data = _read_own(directory / listing) if listing in names else {}
    if not data:
        lacks = f"it has no {MANIFEST}" if listing not in names else f"its {listing} is another's"
        raise ArtifactError(f"{target} exists and is not an artifact ({lacks})", help="choose another directory")
    listed = data.get("programs" if listing == SET else "files")
    listed = listed if isinstance(listed, (list, dict)) else ()  # the listing may be damaged
    for name in names:
        path = directory / name
        if listing == SET and name in listed and os.path.isdir(path):
            _refuse_others(path, target / name)
            continue
        is_named = listing == MANIFEST and name in listed and PARTS.fullmatch(name)
        is_ours = name == listing or is_named or PACKAGED.fullmatch(name)
        if not (is_ours and os.path.isfile(path)) and not UNFINISHED.fullmatch(name):
            raise ArtifactError(
                f"{target} holds {name!r}, which is not part of an artifact",
                help="move it elsewhere, or choose another directory",
            )


def _read_own(listing: Path) -> dict[str, Any]:
    """Return an artifact's listing, even of another version or damaged; empty for one of another tool."""
    with contextlib.suppress(OSError, ValueError):
        data = read_object(listing)
        if data.keys() >= FIELDS[listing.name] and isinstance(data["format"], int):
            return data
    return {}


def _rename_to_free(temporary: Path, target: Path) -> None:
    try:
        temporary.rename(target)
    except OSError as error:
        if os.path.lexists(target):  # another process has written it meanwhile
            raise ArtifactError(f"{target} exists already", help="choose another directory") from error
        raise


def _replace(temporary: Path, target: Path) -> None:
    """Move the old artifact aside and the new one into its place, then delete the old one; a failure loses nothing."""
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
    old = aside / "artifact"
    try:
        target.rename(old)
        try:
            if not old.is_symlink():  # only the link itself is deleted
                _refuse_others(old, target)
            _rename_to_free(temporary, target)
        except (OSError, ArtifactError) as error:
            if os.path.lexists(target):  # another save was faster
                raise ArtifactError(
                    f"cannot write {target}: another process wrote it meanwhile, and the old one is now in {old}",
                    help="keep one of them, and delete the other",
                ) from error
            old.rename(target)
            raise
        _delete(old)
    finally:
        if not os.path.lexists(old):
            aside.rmdir()


def _delete(artifact: Path) -> None:
    """Delete the files of an artifact, and the directory unless other files have appeared in it.

    Raises:
        ArtifactError: other files have appeared; they stay.
    """
    if artifact.is_symlink():
        artifact.unlink()
        return
    for name in os.listdir(artifact):
        if os.path.isdir(artifact / name):
            _delete(artifact / name)
        elif name == SET or PARTS.fullmatch(name) or UNFINISHED.fullmatch(name):
            (artifact / name).unlink()
    try:
        artifact.rmdir()
    except OSError as error:
        raise ArtifactError(
            f"the new artifact is written, but {artifact} remains of the old one: it holds other files",
            help="move or delete it",
        ) from error


LONGEST = 100  # bytes of the target's name: a folder's name may have 255


@contextlib.contextmanager
def scratch_folder(directory: Path, name: str) -> Iterator[Path]:
    """Make a hidden folder in a directory for writing `name`; its remaining content is deleted afterwards.

    A lock that the kernel releases separates the folders of live processes from leftovers of killed ones, which are
    deleted here.

    Raises:
        OSError: the folder cannot be made.
    """
    remove_leftovers(directory)
    short = name.encode(errors="ignore")[:LONGEST].decode(errors="ignore")
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f".{short}.{_mark()}", dir=directory))
        lock = _lock(folder)
        if folder.is_dir():  # no other process mistook it for a leftover before it was locked
            break
        _release(lock)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _release(lock)


def remove_leftovers(directory: Path) -> None:
    """Delete the folders that killed processes on this machine left in a directory."""
    leftover = re.compile(rf"\..*\.{_mark()}[a-z0-9_]{{8}}")
    with contextlib.suppress(OSError):
        for name in filter(leftover.fullmatch, os.listdir(directory)):
            if (lock := _lock(Path(directory) / name)) is not None:
                shutil.rmtree(Path(directory) / name, ignore_errors=True)
                _release(lock)


def _mark() -> str:
    """Return the machine's mark in folder names: locks of other machines may be invisible."""
    return f"tpcompiler-{hashlib.sha256(platform.node().encode()).hexdigest()[:6]}-"


def _lock(folder: Path) -> int | None:
    """Return an open descriptor that holds the folder's lock; None if another process has it, or without locks."""
    try:
        import fcntl

        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except (ImportError, OSError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _release(lock: int | None) -> None:
    if lock is not None:
        os.close(lock)
