"""One checkpoint from machines without shared storage: each sends its files through the remote folder."""

from __future__ import annotations

import os
from pathlib import Path

from hftrain.checkpoint.layout import MANIFEST, checkpoint_name
from hftrain.checkpoint.manifest import write_manifest
from hftrain.checkpoint.remote import RemoteCheckpoints
from hftrain.storage import files
from hftrain.storage.remote import RemoteFolder

_PARCEL = ".parcel-"


class Parcels:
    """Send the files of a staging folder to the main process, from machines that do not see its mirror.

    Args:
        url: The run's remote folder.
        rank: This process.
        is_sender: Whether it is the first of a machine that does not see the main process's mirror.
    """

    def __init__(self, url: str, *, rank: int, is_sender: bool) -> None:
        self.is_sender = is_sender
        self._url, self._rank = url.rstrip("/"), rank

    def clear(self) -> None:
        """Delete leftovers of killed saves, before anything is sent."""
        folder = RemoteFolder(self._url)
        for name in folder.names():
            if name.startswith(_PARCEL):
                folder.delete_folder(name)

    def send(self, staged: Path, *, step: int) -> None:
        """Upload a staging folder with its own manifest, and delete it locally."""
        path = staged.parent / _PARCEL / checkpoint_name(step)
        if path.exists():
            files.discard(path)
        path.parent.mkdir(exist_ok=True)
        os.rename(staged, path)
        write_manifest(path, {}, step=step)
        RemoteCheckpoints(f"{self._url}/{_PARCEL}{self._rank}", mirror=path.parent).publish(
            path, run_id=str(self._rank)
        )
        files.discard(path)

    def collect(self, staged: Path, *, step: int) -> None:
        """Move what was sent into a staging folder, verified."""
        folder = RemoteFolder(self._url)
        for name in [name for name in folder.names() if name.startswith(_PARCEL)]:
            remote = RemoteCheckpoints(f"{self._url}/{name}", mirror=staged.parent / _PARCEL)
            path = remote.fetch(checkpoint_name(step))
            for file in [file for file in files.walk_files(path) if file != path / MANIFEST]:
                target = staged / file.relative_to(path)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(file, target)
            files.discard(path)
            folder.delete_folder(name)
