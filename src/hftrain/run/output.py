"""The output folder of a run. If `output_dir` is a URL, files are written to a local mirror and uploaded."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from hftrain.arguments.training import TrainingArguments
from hftrain.checkpoint.manager import CheckpointManager
from hftrain.checkpoint.manifest import TRAINER_STATE, checkpoint_step
from hftrain.core.errors import CheckpointError, ConfigError
from hftrain.core.extras import extra
from hftrain.core.log import get_logger
from hftrain.storage.files import (
    appears,
    check_url,
    check_writable,
    is_url,
    local_folder,
    mirror_of,
    write_text,
)
from hftrain.strategies.base import Strategy

logger = get_logger(__name__)


class HasArguments(Protocol):
    """What has arguments, which may be replaced."""

    args: TrainingArguments


class Output:
    """The output folder of a Trainer, with uploads and downloads if it is remote.

    Args:
        owner: Its `args.output_dir`, a folder or the URL of a remote one, is read at each use.
    """

    def __init__(self, owner: HasArguments, strategy: Strategy) -> None:
        self._owner, self._strategy = owner, strategy
        self._launch_folder = Path.cwd()
        self._mirrors: dict[str, Any] = {}
        # The URLs of checkpoints that were fetched by URL.
        self._urls: dict[Path, str] = {}

    @property
    def folder(self) -> Path:
        """Where its files are written; for a remote folder, the mirror."""
        return self.locate(str(self._owner.args.output_dir))

    @property
    def url(self) -> str | None:
        """`output_dir` if it is remote."""
        folder = str(self._owner.args.output_dir)
        return folder if is_url(folder) else None

    def locate(self, folder: str) -> Path:
        """Return where the files of any folder are written; for a remote folder, its mirror."""
        if is_url(folder) and folder not in self._mirrors:
            # From now on it detects new files.
            self._mirrors[folder] = extra("remote").Mirror(
                folder, is_left_out=lambda part: checkpoint_step(part) is not None
            )
        return local_folder(folder, start=self._launch_folder)

    def below(self, name: str) -> str:
        """Return a subfolder as a path or URL, in the form of `output_dir`."""
        return f"{self.url.rstrip('/')}/{name}" if self.url else str(self.folder / name)

    def url_of(self, folder: Path) -> str | None:
        """Return the URL of a mirror; None if the folder is not a mirror."""
        if folder == self.folder:
            return self.url
        return next((url for url in self._mirrors if local_folder(url, start=self._launch_folder) == folder), None)

    def text_of(self, folder: Path) -> str:
        """Return a checkpoint's path for the state: its URL if remote, because the mirror may be deleted."""
        return self._remote_text_of(folder) or str(folder)

    def check_writable(self) -> None:
        """Check that the folder is writable, by the main process if it is remote; before processes are launched.

        Several processes check this together once they are launched: if one raised alone, those on other machines
        would wait for it. See `check_shared_folder`.
        """
        if self.url is None and self._strategy.world_size > 1:
            return
        check_writable(self.folder)
        if self.url is not None and self._strategy.is_main:
            extra("remote").RemoteFolder(self.url).check_writable()

    def meet(self) -> Any:
        """Check whether all processes see the mirror of the main process. Collective.

        Returns:
            None if they do; otherwise an object that transfers files there.
        """
        url, strategy = self.url, self._strategy
        if url is None or strategy.world_size == 1:
            return None
        name = strategy.broadcast_object(f".seen-{secrets.token_hex(4)}" if strategy.is_main else None)
        probe = self.folder / name
        probe.parent.mkdir(parents=True, exist_ok=True)
        if strategy.is_main:
            write_text(probe, "test")
        strategy.barrier()
        sees_probe = appears(probe)
        is_shared = strategy.all_true(sees_probe)
        if strategy.is_main:
            probe.unlink()
        is_sender = not sees_probe and strategy.is_local_main
        return (
            None if is_shared else extra("remote_checkpoints").NodeUploads(url, rank=strategy.rank, is_sender=is_sender)
        )

    def publish(self, folder: str | None = None) -> None:
        """Upload new files of a mirror; only in the main process, others return at once.

        Args:
            folder: The remote folder; None means `output_dir`. A local folder is ignored.
        """
        url = folder or str(self._owner.args.output_dir)
        mirror = self._mirrors.get(url)
        if mirror is None or not self._strategy.is_main:
            return
        try:
            mirror.publish()
        except OSError as error:
            raise CheckpointError(
                f"Cannot upload files to {url}.",
                f"{str(error).rstrip('.')}.",
                f"They are complete in {mirror.folder}: fix the cause and write them again, or copy them.",
            ) from error

    def publish_together(self, folder: str | None = None) -> None:
        """Call `publish`, and raise on all processes if it fails. Collective."""
        complaint = "The main process could not upload its files; see its error."
        self._call_together(lambda: self.publish(folder), complaint=complaint)

    def publish_quietly(self) -> None:
        """Call `publish` for less important files, such as logs: a failure only warns."""
        try:
            self.publish()
        except CheckpointError as error:
            logger.warning("%s", error)

    def fetch_named(self, name: str | Path) -> Path | None:
        """Fetch a checkpoint given by its URL, or by its name in a remote output folder.

        Returns:
            The verified copy; None if it is not remote.
        """
        url_text, output_url = str(name), self.url
        if not is_url(url_text):
            if output_url is None or Path(url_text).is_dir() or len(Path(url_text).parts) != 1:
                return None
            url_text = f"{output_url.rstrip('/')}/{url_text}"
        check_url(url_text)
        if not is_url(url_text.rstrip("/").rpartition("/")[0]):
            raise ConfigError(f"Cannot resume from {url_text!r}.", "It names no folder.", "Name a checkpoint's folder.")
        path = _fetch(url_text)
        self._urls[path] = url_text
        return path

    def find(self, name: str | Path) -> Path:
        """Return the local folder of that name: relative to the working directory, or to the output folder."""
        inside = self.folder / name
        return inside if inside.is_dir() and not Path(name).is_dir() else Path(name)

    def share(self, checkpoint: Path | None, *, is_on_each_node: bool) -> Path | None:
        """Return the path on this machine of a checkpoint that the main process has found, None for none. Collective.

        Args:
            checkpoint: Read in the main process.
            is_on_each_node: Whether each machine keeps checkpoints on its own storage (`save_on_each_node`).

        Raises:
            CheckpointError: On a machine that keeps its own checkpoints, this one is missing or damaged.
        """
        url = None if checkpoint is None else self._urls.get(checkpoint) or self._remote_text_of(checkpoint)
        path, url = self._strategy.broadcast_object((None if checkpoint is None else str(checkpoint), url))
        if path is None:
            return None
        folder = Path(path) if url is None else self._fetch_together(url, main_has_it=True)
        if not is_on_each_node:
            return folder
        local_copy = self.folder / folder.name
        node_folder = local_copy if (local_copy / TRAINER_STATE).is_file() else folder

        def check() -> None:
            if CheckpointManager.open(node_folder) is None:
                extra("foreign_checkpoints").check_foreign(node_folder)

        complaint = "It is missing on another machine; see the error there."
        try:
            self._call_together(check, is_mine=self._strategy.is_local_main, complaint=complaint)
        except CheckpointError as error:
            raise CheckpointError(
                f"Cannot resume from {folder.name} with save_on_each_node=True.",
                complaint if str(error) == complaint else f"It is missing on this machine: {error}",
                "Name a checkpoint that all machines hold, or copy it to each of them.",
            ) from error
        return node_folder

    def fetch_best(self, best: Path) -> None:
        """Fetch the best checkpoint into each machine's mirror, if it exists and is not there yet. Collective."""
        url = self.url_of(best.parent)
        if url is None:
            return
        exists = best.name in extra("remote").RemoteFolder(url).names() if self._strategy.is_main else None
        if self._strategy.broadcast_object(exists):
            self._fetch_together(f"{url.rstrip('/')}/{best.name}")

    def _remote_text_of(self, folder: Path) -> str | None:
        """Return the URL of a folder in the output folder's mirror, None if it is elsewhere."""
        url = self.url_of(folder.parent)
        return f"{url.rstrip('/')}/{folder.name}" if url else None

    def _fetch_together(self, text: str, *, main_has_it: bool = False) -> Path:
        """Fetch a checkpoint on the main process, then on the first of each machine; return its path. Collective."""
        strategy = self._strategy
        for is_mine in (strategy.is_main and not main_has_it, strategy.is_local_main and not strategy.is_main):
            complaint = f"Another process could not fetch {text}; see its error."
            self._call_together(lambda: _fetch(text), is_mine=is_mine, complaint=complaint)
        url, _, name = text.rstrip("/").rpartition("/")
        return mirror_of(url) / name

    def _call_together(self, call: Callable[[], object], *, is_mine: bool = True, complaint: str) -> None:
        """Call a function on some processes, and raise on all if it fails on one. Collective."""
        cause: CheckpointError | None = None
        try:
            if is_mine:
                call()
        except CheckpointError as error:
            cause = error
        if not self._strategy.all_true(cause is None):
            raise cause or CheckpointError(complaint)


def _fetch(text: str) -> Path:
    url, _, name = text.rstrip("/").rpartition("/")
    path: Path = extra("remote_checkpoints").RemoteCheckpoints(url, mirror=mirror_of(url)).fetch(name)
    return path
