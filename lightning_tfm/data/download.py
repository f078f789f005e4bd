"""Download of data files into a cache, with verification of their SHA-256."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

from lightning_tfm.errors import UserError
from lightning_tfm.system.progress import progress_bar

MIRROR = "LIGHTNING_TFM_DATA"
"""Environment variable that names a mirror of all files: a URL or a folder."""

TIMEOUT = 30.0
"""Timeout for a server that sends no data, in seconds."""


class Download(NamedTuple):
    """URL of a file, used unless there is a mirror, and the SHA-256 of its content."""

    address: str
    sha256: str


def cache_folder() -> Path:
    """Return the user's folder of downloads and of token files."""
    import pooch  # slow to import

    return Path(pooch.os_cache("lightning_tfm"))


def download(name: str, file: Download) -> Path:
    """Return the path of a file in a local mirror or in the cache, downloading it if necessary.

    The name is the path of the file relative to the cache and the mirror, such as multi30k/train.de.gz. A mirror folder
    may also contain the file without the leading folder, as train.de.gz.

    Raises:
        UserError: if the file cannot be obtained, or its SHA-256 differs.
    """
    import pooch  # slow to import
    import requests
    from filelock import FileLock

    address, sha256 = file
    mirror = os.environ.get(MIRROR, "")
    if mirror and "://" not in mirror:
        paths = [Path(mirror) / name, Path(mirror) / Path(name).name]
        path = next((path for path in paths if path.is_file()), None)
        if path is None:
            raise UserError(
                f"{MIRROR} must name a folder that holds {name!r} or {paths[1].name!r}, but {mirror!r} does not"
            )
        if pooch.file_hash(str(path)) != sha256:
            raise UserError(_unexpected(str(path), sha256))
        return path
    source = f"{mirror.rstrip('/')}/{name}" if mirror else address
    cache = cache_folder()
    path, part = cache / name, cache / f"{name}.part"
    pooch.get_logger().setLevel("ERROR")
    retrieve = partial(pooch.retrieve, source, sha256, name, cache, downloader=partial(_continue_download, part))
    kept = 0  # bytes of an earlier, interrupted download
    try:
        # This is checked before anything is written, since the cache may be read-only.
        if path.is_file() and pooch.file_hash(str(path)) == sha256:
            return path
        part.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{part}.lock"):  # one process of a run downloads
            kept = part.stat().st_size if part.exists() else 0
            try:
                return Path(retrieve())
            except ValueError:
                if not kept:
                    raise
                return Path(retrieve())  # the kept bytes may be wrong
    except requests.RequestException as error:
        reason = error.response.reason if error.response is not None else "the server does not respond"
        if part.exists() and part.stat().st_size > kept:
            reason = "the connection was interrupted; the part received is kept, and the next attempt resumes it"
        raise UserError(
            f"{name!r} cannot be downloaded from {source}: {reason}. {MIRROR} may name a mirror: an address, or a "
            "folder that holds the file"
        ) from None
    except ValueError:
        raise UserError(_unexpected(source, sha256)) from None
    except OSError as error:
        raise UserError(
            f"{name!r} cannot be kept in {str(cache)!r}: {error.strerror}; free disk space, or set XDG_CACHE_HOME to "
            "another folder"
        ) from None


def _unexpected(path: str, sha256: str) -> str:
    return f"{path} has an unexpected SHA-256 (expected {sha256[:20]}...) and is not used"


def _continue_download(part: Path, address: str, output: str, _: object) -> None:
    """Download the missing bytes of `part` and move it to `output`, where pooch verifies the SHA-256."""
    import requests

    begin = part.stat().st_size if part.exists() else 0
    # Disable compression, since a compressed transfer cannot be resumed.
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={begin}-"} if begin else {})
    with requests.get(address, headers=headers, stream=True, timeout=TIMEOUT) as response:
        if begin and response.status_code == 416:  # no bytes are missing, but `part` was never verified: restart
            part.unlink()
            return _continue_download(part, address, output, _)
        response.raise_for_status()
        begin = begin if response.status_code == 206 else 0
        length = response.headers.get("Content-Length")
        bar = progress_bar(
            f"downloading {part.stem}",
            sys.stderr.isatty(),
            total=begin + int(length) if length else None,
            initial=begin,
            unit="B",
            unit_scale=True,
            leave=False,
        )
        with part.open("ab" if begin else "wb") as file, bar:
            for chunk in response.iter_content(1 << 16):
                file.write(chunk)
                bar.update(len(chunk))
    part.replace(output)
    return None
