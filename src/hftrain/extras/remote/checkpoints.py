"""Checkpoints in a remote store: the upload of the manifest, as the last file, is the commit."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from hftrain.checkpoint.manifest import (
    MANIFEST,
    TRAINER_STATE,
    Manifest,
    checkpoint_step,
    inner_path,
    read_manifest,
    verify,
    write_manifest,
)
from hftrain.checkpoint.rotation import Checkpoints, LocalCheckpoints, UnreachableError, commit_order
from hftrain.core.errors import CheckpointError
from hftrain.core.log import get_logger
from hftrain.extras.remote.folders import RemoteFolder
from hftrain.storage import files

# The folders in which machines without shared storage hand over their files.
_PARCEL = ".parcel-"
# Marks a folder without a manifest as an unfinished upload or deletion of a run; the run's id follows.
_INCOMPLETE = ".incomplete-"
_MAX_MANIFEST_BYTES = 1 << 28

logger = get_logger(__name__)


class RemoteCheckpoints(Checkpoints):
    """Publish, list, fetch and delete the checkpoints of a remote folder; used by one process only.

    A folder is a checkpoint as long as it contains a manifest. Before the first file of an upload, and before the
    manifest is deleted, the run writes its id into the folder. A run only sweeps folders without manifest that have
    its own id.

    Args:
        mirror: The local folder in which checkpoints are written, and to which they are fetched.
    """

    def __init__(self, url: str, *, mirror: Path) -> None:
        super().__init__()
        self.folder = RemoteFolder(url)
        self.mirror = mirror
        self._has_swept = False

    def publish(self, path: Path, *, run_id: str) -> None:
        """Upload a committed checkpoint of the mirror, replacing one of the same name; committed on return.

        The replaced checkpoint is gone as soon as the upload starts.

        Raises:
            CheckpointError: The store cannot be used; the checkpoint remains in the mirror.
        """
        try:
            self._sweep(run_id, besides=path.name)
            self._upload(path, run_id)
        except OSError as error:
            self._has_swept = False
            raise CheckpointError(
                f"Cannot upload {path.name} to {self.folder.url}.",
                f"{str(error).rstrip('.')}.",
                f"It is whole in {path}: resume from there, or copy it to the store, its {MANIFEST} last.",
            ) from error

    def names(self) -> list[str]:
        """List the folders with names of checkpoints; raises `UnreachableError` if the store cannot be used."""
        try:
            return [name for name in self.folder.names() if checkpoint_step(name) is not None]
        except OSError as error:
            raise self._unreachable(error) from error

    def read(self, name: str) -> Manifest | None:
        with tempfile.TemporaryDirectory() as folder:
            try:
                manifest = self._download_manifest(name, Path(folder) / name)
            except (CheckpointError, FileNotFoundError):
                return None
            except OSError as error:
                raise self._unreachable(error) from error
        return manifest if manifest.step == checkpoint_step(name) else None

    def latest(self, is_asked_for: Callable[[Manifest], bool] = lambda manifest: True) -> Path | None:
        """Fetch the newest intact checkpoint, or return None; a warning lists those that were skipped.

        Raises:
            UnreachableError: The store cannot be used; no older one is taken instead.
        """
        self._cache = {}  # read them again
        manifests = self.manifests()
        path = None
        for name, manifest in reversed(manifests.items()):
            try:
                if manifest is None:
                    raise self._damaged(name, f"It has no {MANIFEST} that can be trusted")
                if is_asked_for(manifest):
                    path = self.fetch(name)
                    break
            except UnreachableError:
                raise
            except CheckpointError as error:
                logger.warning("Skipped %s when looking for the newest checkpoint: %s", name, error)
        self._report_unpublished(manifests, None if path is None else path.name)
        return path

    def rotate(self, run_id: str, limit: int | None, kept: Callable[[Mapping[str, Manifest]], set[str]]) -> None:
        """Delete a run's oldest checkpoints beyond the limit; failures only warn."""
        try:
            super().rotate(run_id, limit, kept)
        except UnreachableError as error:
            logger.warning("Could not delete old checkpoints: %s", error)

    def fetch(self, name: str) -> Path:
        """Return a checkpoint's folder in the mirror, verified, and downloaded unless it is already there.

        A checkpoint of the Hugging Face Trainer has no manifest: it is downloaded without verification.

        Raises:
            CheckpointError: It is damaged.
            UnreachableError: The store cannot be used.
        """
        try:
            return self._fetch(name)
        except FileNotFoundError as error:
            raise self._damaged(name, f"It lacks a file: {error}") from error
        except OSError as error:
            raise self._unreachable(error) from error

    def remove(self, name: str, run_id: str) -> None:
        """Delete a checkpoint of a run, its manifest first; failures only warn."""
        try:
            self._mark_incomplete(name, run_id)
            self.folder.delete_file(f"{name}/{MANIFEST}")
            self.folder.delete_folder(name)
        except OSError as error:
            logger.warning("Could not delete %s/%s: %s", self.folder.url, name, error)

    def _upload(self, path: Path, run_id: str) -> None:
        self.note(path.name, None)
        marker = self._mark_incomplete(path.name, run_id)
        names = [file.relative_to(path).as_posix() for file in files.walk_files(path)]
        existing = self.folder.sizes(path.name).keys() - {marker}
        # The manifest first; new files replace those of the same name.
        for name in sorted(existing & {MANIFEST}) + sorted(existing - {*names}):
            self.folder.delete_file(f"{path.name}/{name}")
        for name in sorted(names, key=lambda name: name == MANIFEST):
            if name == MANIFEST:
                self._check_sizes(path, names)
            self.folder.upload(path / name, f"{path.name}/{name}")
        self.note(path.name, read_manifest(path))
        self.folder.delete_file(f"{path.name}/{marker}")
        logger.info("Uploaded %s to %s.", path.name, self.folder.url)

    def _check_sizes(self, path: Path, names: list[str]) -> None:
        """Raise if sizes in the store are wrong, before the manifest is uploaded."""
        sizes = self.folder.sizes(path.name)
        for name in names:
            size = (path / name).stat().st_size
            if name != MANIFEST and sizes.get(name) != size:
                raise OSError(f"{path.name}/{name} has {sizes.get(name)} bytes there instead of {size}")

    def _mark_incomplete(self, name: str, run_id: str) -> str:
        self.folder.write(f"{name}/{_INCOMPLETE}{run_id}", "")
        return f"{_INCOMPLETE}{run_id}"

    def _sweep(self, run_id: str, *, besides: str) -> None:
        """Delete leftovers of killed processes of this run, once: no other process can leave any later."""
        for name in [] if self._has_swept else self.names():
            if name != besides:
                sizes = self.folder.sizes(name)
                if MANIFEST not in sizes and f"{_INCOMPLETE}{run_id}" in sizes:
                    self.folder.delete_folder(name)
        self._has_swept = True

    def _download_manifest(self, name: str, folder: Path) -> Manifest:
        self.folder.download(f"{name}/{MANIFEST}", folder / MANIFEST)
        return read_manifest(folder)

    def _fetch(self, name: str) -> Path:
        """Download into a staging folder and commit that, so that a killed fetch leaves no half checkpoint."""
        sizes = self.folder.sizes(name)
        if sizes.get(MANIFEST, 0) > _MAX_MANIFEST_BYTES:
            raise self._damaged(name, f"Its {MANIFEST} has {sizes[MANIFEST]} bytes")
        if MANIFEST not in sizes and TRAINER_STATE not in sizes:
            raise self._damaged(name, f"It is not a checkpoint: it has no {MANIFEST}")
        target = self.mirror / name
        staged = files.begin(target)
        try:
            manifest = self._download_manifest(name, staged) if MANIFEST in sizes else None
            if manifest is not None and _holds(target, manifest):
                files.discard(staged)
                return target
            self._download(name, staged, manifest, sizes)
            files.commit(staged, target)
        except BaseException:
            files.discard(staged)
            raise
        logger.info("Fetched %s/%s to %s.", self.folder.url, name, target)
        return target

    def _download(self, name: str, staged: Path, manifest: Manifest | None, sizes: Mapping[str, int]) -> None:
        expected = sizes if manifest is None else {file: record["size"] for file, record in manifest.files.items()}
        for file, size in expected.items():
            target = inner_path(staged, file)
            if sizes.get(file) != size:
                raise self._damaged(f"{name}/{file}", f"It has {sizes.get(file)} bytes instead of {size}")
            self.folder.download(f"{name}/{file}", target)
        if manifest is not None and verify(staged).step != checkpoint_step(name):
            raise self._damaged(name, f"It was saved at step {manifest.step}, as another folder")

    def _report_unpublished(self, manifests: Mapping[str, Manifest | None], latest: str | None) -> None:
        """Warn of a checkpoint in the mirror whose upload failed, if it is newer than the one found."""
        newest = manifests.get(latest or "")
        for name, manifest in reversed(LocalCheckpoints(self.mirror).manifests().items()):
            is_newer = newest is None or (
                manifest is not None
                and manifest.facts.get("run_id") == newest.facts.get("run_id")
                and commit_order(name, manifest) > commit_order(latest or "", newest)
            )
            if manifest is not None and is_newer and name not in manifests:
                logger.warning(
                    "%s is newer than what %s holds, and was never uploaded. It is not taken by itself: "
                    "resume_from_checkpoint=%r takes it.",
                    self.mirror / name,
                    self.folder.url,
                    str(self.mirror / name),
                )
                return

    def _damaged(self, name: str, reason: str) -> CheckpointError:
        return files.unreadable(f"{self.folder.url}/{name}", reason)

    def _unreachable(self, error: OSError) -> UnreachableError:
        return UnreachableError(
            f"Cannot read the checkpoints in {self.folder.url}.",
            f"{str(error).rstrip('.')}.",
            "Check the network, the credentials and the room on the local disk, then try again.",
        )


def _holds(folder: Path, manifest: Manifest) -> bool:
    try:
        return verify(folder) == manifest
    except CheckpointError:
        return False


class NodeUploads:
    """Send the files of a staging folder to the main process, from machines that do not see its mirror.

    Args:
        is_sender: Whether it is the first of a machine that does not see the main process's mirror.
    """

    def __init__(self, url: str, *, rank: int, is_sender: bool) -> None:
        self.is_sender = is_sender
        self._folder, self._rank = RemoteFolder(url), rank

    def clear(self) -> None:
        """Delete leftovers of killed saves, before anything is sent."""
        for name in self._parcels():
            self._folder.delete_folder(name)

    def send(self, staged: Path, *, step: int) -> None:
        """Upload a staging folder with its own manifest, and delete it locally."""
        write_manifest(staged, {}, step=step)
        for path in files.walk_files(staged):
            self._folder.upload(path, f"{_PARCEL}{self._rank}/{path.relative_to(staged).as_posix()}")
        files.discard(staged)

    def collect(self, staged: Path) -> None:
        """Move what was sent into a staging folder, verified."""
        for name in self._parcels():
            with tempfile.TemporaryDirectory(prefix=_PARCEL, dir=staged.parent) as temporary:
                parcel = Path(temporary)
                for file in self._folder.sizes(name):
                    self._folder.download(f"{name}/{file}", inner_path(parcel, file))
                for file in verify(parcel).files:
                    (staged / file).parent.mkdir(parents=True, exist_ok=True)
                    os.replace(parcel / file, staged / file)
            self._folder.delete_folder(name)

    def _parcels(self) -> list[str]:
        return [name for name in self._folder.names() if name.startswith(_PARCEL)]
