"""Files from the internet: named by address and SHA-256, kept in a cache, never trusted before they are whole."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from lightning_tfm.errors import UserError

MIRROR = "LIGHTNING_TFM_DATA"
"""The environment variable that names another place for all files: an address or a folder."""

PATIENCE = 30.0
"""Seconds that a server may be silent."""


def mirror_from_elsewhere() -> dict[str, str]:
    """What the environment of a process in another folder must say, so that its mirror is ours."""
    mirror = os.environ.get(MIRROR)
    return {MIRROR: os.path.abspath(mirror)} if mirror and "://" not in mirror else {}


class Download(NamedTuple):
    """Where a file lies, where there is no mirror, and the SHA-256 of its content."""

    address: str
    sha256: str


def download(name: str, file: Download) -> Path:
    """A file, from the cache, the mirror or the internet.

    Args:
        name: what it is called in the cache and below a mirror, as multi30k/train.de.gz; a mirror that is a folder may
            leave the name's own folder out.
        file: where it lies.

    Raises:
        UserError: if it cannot be had, or is another file.
    """
    import pooch  # takes a while to import, which most runs need not wait for
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
        if not _is_right(path, sha256):
            raise UserError(_another(str(path), sha256))
        return path
    source = f"{mirror.rstrip('/')}/{name}" if mirror else address
    cache = Path(pooch.os_cache("lightning_tfm"))
    path, part = cache / name, cache / f"{name}.part"
    pooch.get_logger().setLevel("ERROR")
    retrieve = partial(pooch.retrieve, source, sha256, name, cache, downloader=partial(_go_on, part))
    kept = 0  # bytes of an earlier download that broke off
    try:
        if path.is_file() and _is_right(path, sha256):  # before all else, for the cache may be another's
            return path
        part.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{part}.lock"):  # one process of those that train together downloads it
            kept = part.stat().st_size if part.exists() else 0
            try:
                return Path(retrieve())
            except ValueError:
                if not kept:
                    raise
                return Path(retrieve())  # whole: what was kept may have been of another file
    except requests.RequestException as error:
        reason = error.response.reason if error.response is not None else "there is no answer"
        if part.exists() and part.stat().st_size > kept:
            reason = "it broke off; what has arrived is kept, and gone on with"
        raise UserError(
            f"{name!r} cannot be downloaded from {source}: {reason}. {MIRROR} may name a mirror: an address, or a "
            "folder that holds the file"
        ) from None
    except ValueError:
        raise UserError(_another(source, sha256)) from None
    except OSError as error:
        raise UserError(
            f"{name!r} cannot be kept in {str(cache)!r}: {error.strerror}; make room there, or let XDG_CACHE_HOME name "
            "another folder"
        ) from None


def _is_right(path: Path, sha256: str) -> bool:
    """Whether a file has the sum."""
    import pooch

    return pooch.file_hash(str(path)) == sha256


def _another(place: str, sha256: str) -> str:
    return f"{place} must be the file of SHA-256 {sha256[:20]}..., but is another one, and is not used"


def _go_on(part: Path, address: str, output: str, _: object) -> None:
    """Downloads what `part` lacks, and moves it to `output`, where pooch looks at its sum."""
    import requests

    begin = part.stat().st_size if part.exists() else 0
    # As it is: of what is packed on its way, no part could be gone on with.
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={begin}-"} if begin else {})
    with requests.get(address, headers=headers, stream=True, timeout=PATIENCE) as response:
        if begin and response.status_code == 416:  # there is no more: begin anew, for it is not known to be right
            part.unlink()
            return _go_on(part, address, output, _)
        response.raise_for_status()
        begin = begin if response.status_code == 206 else 0
        length = response.headers.get("Content-Length")
        bar = tqdm(
            desc=part.stem,
            total=begin + int(length) if length else None,
            initial=begin,
            unit="B",
            unit_scale=True,
            leave=False,
            disable=not sys.stderr.isatty(),
        )
        with part.open("ab" if begin else "wb") as file, bar:
            for chunk in response.iter_content(1 << 16):
                file.write(chunk)
                bar.update(len(chunk))
    part.replace(output)
    return None
