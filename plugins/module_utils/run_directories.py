# Copyright (c) hidden_state.bridge contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Output directories of earlier runs: find them, measure them, mark foreign ones, and delete them without going astray.

PRIVATE to the collection.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat

from ansible_collections.hidden_state.bridge.plugins.module_utils import hs_manifest

ADOPTED = "adopted"
# Levels below a root that are searched for markers: the root itself, a run's directory, a host's directory in it.
DEPTH = 2
# The fewest names of a path that may be adopted: /data alone is too much to be one run.
LEAST_PARTS = 2


class RunError(Exception):
    """A directory that must not be touched, with the reason and the remedy."""


def checked_path(path):
    """The path, where it is absolute, without `..` and without a link in it. Raises RunError."""
    if not os.path.isabs(path):
        raise RunError("%s is not an absolute path; name a run as the list does" % path)
    plain = path.rstrip("/") or "/"
    if ".." in path.split("/") or os.path.normpath(plain) != plain:
        raise RunError("%s is not a plain path (it holds .. or . or //); name a run as the list does" % path)
    if os.path.realpath(plain) != plain:
        raise RunError("%s leads through a symbolic link to %s; name the directory itself" % (path, os.path.realpath(plain)))
    return plain


def marker_of(path):
    """The marker in a directory, or None. A marker that is a link is none. Raises ManifestError for a damaged one."""
    name = os.path.join(path, hs_manifest.MARKER)
    try:
        if not stat.S_ISREG(os.lstat(name).st_mode):
            return None
    except (FileNotFoundError, NotADirectoryError):
        return None
    return hs_manifest.read_json(name)


def find(roots):
    """Paths of the directories with a marker below the roots, links not followed, sorted."""
    found = set()
    for root in roots:
        _search(os.path.realpath(root), DEPTH, found)
    return sorted(found)


def has_marker(path):
    """Whether something with the marker's name lies in a directory."""
    return os.path.lexists(os.path.join(path, hs_manifest.MARKER))


def _search(path, depth, found):
    if has_marker(path):
        found.add(path)
        return
    if not depth:
        return
    try:
        with os.scandir(path) as entries:
            below = sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return
    for directory in below:
        _search(directory, depth - 1, found)


def measure(path):
    """Files, bytes on disk, oldest and newest time of change (seconds since the epoch) of what lies in a directory.

    Links are counted as links, never followed. A directory on another file system is not entered: it is named in
    `mounts`. What vanishes meanwhile counts for nothing. Raises OSError.
    """
    found = {"files": 0, "bytes": 0, "oldest": None, "newest": None, "mounts": [], "markers": []}
    try:
        device = os.lstat(path).st_dev
    except FileNotFoundError:
        return found
    waiting = [path]
    while waiting:
        directory = waiting.pop()
        # An extractor at work renames its temporary files, and on a shared file system another host may delete this directory.
        with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
            for entry in entries:
                try:
                    info = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if stat.S_ISDIR(info.st_mode):
                    if info.st_dev != device or os.path.ismount(entry.path):
                        found["mounts"].append(entry.path)
                    else:
                        waiting.append(entry.path)
                    continue
                if entry.name == hs_manifest.MARKER and directory != path:
                    found["markers"].append(directory)
                found["files"] += 1
                found["bytes"] += info.st_blocks * 512
                found["oldest"] = min(info.st_mtime, found["oldest"] or info.st_mtime)
                found["newest"] = max(info.st_mtime, found["newest"] or info.st_mtime)
    return found


def describe(path, marker):
    """One run for the list: path, run, kind, files, bytes, records, tokens, oldest, newest, running."""
    found = {"path": path, "kind": marker.get("kind", ""), "run": marker.get("run", ""), "records": None, "tokens": None, "running": False}
    found.update(measure(path))
    if found["kind"] in (hs_manifest.EXTRACTION, hs_manifest.COLLECTION):
        manifest = hs_manifest.Manifest(path)
        found["records"] = len(manifest.entries)
        found["tokens"] = sum(entry["tokens"] for entry in manifest.entries.values())
        found["running"] = hs_manifest.is_locked(path)
    return found


def within(path, other):
    """Whether a path is the other one or lies below it."""
    return path == other or path.startswith(other.rstrip("/") + "/")


def check_removable(path, marker, kept):
    """Refuse (RunError) to delete a directory that is no run of ours, is at work, or holds or lies in what is kept.

    kept: {path: what it is}.
    """
    if not os.path.isdir(path):
        raise RunError("%s is not there; call the list again" % path)
    if marker is None or marker.get("kind") not in (hs_manifest.EXTRACTION, hs_manifest.COLLECTION, ADOPTED):
        raise RunError(
            "%s has no marker of ours (%s); if its content is an old run, adopt it first (clean_adopt)" % (path, hs_manifest.MARKER)
        )
    for other, what in sorted(kept.items()):
        if within(os.path.realpath(other), path) or within(path, os.path.realpath(other)):
            raise RunError("%s is, holds or lies in %s (%s); it is not deleted" % (path, other, what))
    if marker.get("kind") != ADOPTED and hs_manifest.is_locked(path):
        raise RunError("%s: an extractor is at work there; stop it first" % path)
    found = measure(path)
    if found["mounts"] or os.path.ismount(path):
        raise RunError("%s is or holds a mounted file system (%s); unmount it first" % (path, ", ".join(found["mounts"] or [path])))
    if found["markers"]:
        raise RunError("%s holds other runs (%s); name those" % (path, ", ".join(sorted(found["markers"])[:3])))


def remove(path):
    """Delete a directory that `check_removable` let pass; its marker goes last, so that an interrupted call is found again.

    Works relative to open directories and follows no link, so nothing can lead it out. What is gone already is what is wanted: on a
    shared file system all hosts delete what is named at once. Raises RunError where an extractor has begun meanwhile, and OSError.
    """
    last = (hs_manifest.MARKER, hs_manifest.LOCK)
    parent = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as held:
            directory = os.open(os.path.basename(path), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
            held.callback(os.close, directory)
            _keep_out(path, directory, held)
            _empty(os.path.basename(path), parent, last)
            os.fsync(directory)
            for name in last:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=directory)
            os.rmdir(os.path.basename(path), dir_fd=parent)
        os.fsync(parent)
    finally:
        os.close(parent)


def _keep_out(path, directory, held):
    """Let no extractor take the directory while `held` is open; all who delete it may. Raises RunError where one is at work."""
    try:
        lock = os.open(hs_manifest.LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=directory)
    except FileNotFoundError:
        return
    held.callback(os.close, lock)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        raise RunError("%s: an extractor has begun to work there; it is not deleted" % path) from error


def _empty(name, parent, spare=()):
    """Remove what lies in a directory, but for `spare`. Raises OSError, FileNotFoundError where the directory itself is gone."""
    directory = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    try:
        device = os.fstat(directory).st_dev
        for entry in sorted(os.listdir(directory)):
            if entry in spare:
                continue
            with contextlib.suppress(FileNotFoundError):
                info = os.lstat(entry, dir_fd=directory)
                if not stat.S_ISDIR(info.st_mode):
                    os.unlink(entry, dir_fd=directory)
                    continue
                if info.st_dev != device:
                    raise OSError("%s in %s is on another file system" % (entry, name))
                _empty(entry, directory)
                os.rmdir(entry, dir_fd=directory)
    finally:
        os.close(directory)


def check_adoptable(path, kept):
    """Refuse (RunError) to mark a directory that cannot be the states of an older run."""
    if not os.path.isdir(path):
        raise RunError("%s is not a directory; name the directory of the old run" % path)
    if len(path.strip("/").split("/")) < LEAST_PARTS:
        raise RunError("%s is too near to the root to be one run; name the directory that holds its files" % path)
    if os.path.ismount(path):
        raise RunError("%s is a mounted file system; name the directory of the old run on it" % path)
    marker = marker_of(path)
    if marker is not None and marker.get("kind") != ADOPTED:
        raise RunError("%s carries our marker already; it needs no adoption" % path)
    for other, what in sorted(kept.items()):
        if within(os.path.realpath(other), path) or within(path, os.path.realpath(other)):
            raise RunError("%s is, holds or lies in %s (%s); it is no old run" % (path, other, what))
    found = measure(path)
    if found["mounts"] or found["markers"]:
        raise RunError("%s holds %s; it is no old run by itself" % (path, ", ".join(sorted(found["mounts"] + found["markers"])[:3])))
    return dict(found, path=path, names=sorted(os.listdir(path))[:10], adopted=marker is not None)


def adopt(path):
    """Mark a directory that `check_adoptable` let pass. Raises OSError."""
    marker = {"kind": ADOPTED, "run": "", "adopted_at": hs_manifest.utc_now()}
    hs_manifest.write_json(os.path.join(path, hs_manifest.MARKER), marker)
