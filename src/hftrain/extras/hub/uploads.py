"""Commits to one repository of the Hub, in the background or not; failures raise or warn."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hftrain.core.errors import ConfigError
from hftrain.core.extras import require
from hftrain.core.log import get_logger
from hftrain.extras.hub.files import drop, drop_abandoned, folder_files, take_snapshot
from hftrain.storage.locks import FolderLock

REQUIREMENT = "huggingface_hub>=0.34"

# References that need no new branch: a commit's hash, a pull request, and the main branch.
_NO_BRANCH = re.compile(r"[0-9a-f]{40}|refs/.+|main")

logger = get_logger(__name__)


def require_hub(feature: str) -> None:
    """Raise `MissingDependencyError` unless huggingface_hub is installed."""
    require(REQUIREMENT, feature=feature, extra="hub")


@dataclass(frozen=True, kw_only=True, slots=True)
class Push:
    """One commit.

    Args:
        folders: Whole folders by their names in the repository; other files in these are deleted there.
        revision: The branch; None is the main one.
        token: Access token; None takes that of the `Uploads`.
    """

    message: str
    files: Mapping[str, Path]
    folders: Mapping[str, Path] = field(default_factory=dict)
    revision: str | None = None
    token: str | None = field(default=None, repr=False)
    shows_progress: bool = True


class Uploads:
    """Push to one repository, one commit at a time; only in the main process.

    Args:
        model_id: The repository: ``name``, in the user's own namespace, or ``owner/name``.
        token: Access token; None takes the stored login.
        private: Whether a new repository is private; None follows the owner's default.
    """

    def __init__(
        self, output_dir: Path, model_id: str, *, token: str | None = None, private: bool | None = None
    ) -> None:
        from huggingface_hub import HfApi

        self.output_dir, self.model_id, self.private = output_dir, model_id, private
        self.api = HfApi(token=token, library_name="hftrain")
        self.repo_id: str | None = None
        self.newest: Future[Any] | None = None
        self.num_pushes = self.num_failed = 0
        self._next_folders: dict[str, Path] = {}
        self._branches: set[str] = set()

    def open_repo(self, *, token: str | None = None) -> str:
        """Create the repository unless it exists, and return its full name."""
        try:
            url = self.api.create_repo(
                self.model_id, token=token, private=self.private, exist_ok=True, repo_type="model"
            )
        except Exception as error:
            status = getattr(getattr(error, "response", None), "status_code", 500)
            if not isinstance(error, ValueError) and (status >= 500 or status in (408, 429)):
                raise
            raise ConfigError(
                f"Cannot push to the Hub repository {self.model_id!r}.",
                f"The Hub refuses it: {str(error).strip()}.",
                "Set hub_model_id to a repository of yours, and log in with `hf auth login` or give a hub_token "
                "that may write there.",
                hub_model_id=self.model_id,
            ) from error
        drop_abandoned(self.output_dir)
        self.repo_id = str(url.repo_id)
        return self.repo_id

    def remember(self, name: str, folder: Path) -> None:
        """Add a whole folder to the next push; it replaces the folder of that name in the repository."""
        self._next_folders[name] = folder

    def upload(self, push: Push) -> Any:
        """Wait for background pushes, push, and return the commit; errors of huggingface_hub are raised."""
        self.wait()
        push, self._next_folders = self._with_folders(push), {}
        return self._commit(push, _all_files(push))

    def submit(self, push: Push) -> Future[Any]:
        """Push a snapshot in the background; a failure causes a warning, and is stored in the returned future.

        Folders that could not be pushed are added to the next push.
        """
        push = self._with_folders(push)
        snapshot = take_snapshot(_all_files(push), self.output_dir)
        self._next_folders = {}
        # A thread per push, which ends with it; those of `HfApi.run_as_future` live as long as the HfApi.
        pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hftrain-push")
        self.newest = pool.submit(self._commit_after, push, snapshot, previous=self.newest)
        pool.shutdown(wait=False)
        # `is_done` is the name in transformers' `push_in_progress`.
        vars(self.newest)["is_done"] = self.newest.done
        return self.newest

    def wait(self) -> None:
        """Wait until no push runs in the background."""
        if self.newest is not None:
            wait([self.newest])

    def _with_folders(self, push: Push) -> Push:
        # Without checkpoints that rotation has deleted since.
        return replace(push, folders={name: folder for name, folder in self._next_folders.items() if folder.is_dir()})

    def _commit_after(self, push: Push, snapshot: FolderLock, *, previous: Future[Any] | None) -> Any:
        """Commit a snapshot after the previous push, so that commits are in the order of the saves."""
        wait([] if previous is None else [previous])
        try:
            return self._commit(push, folder_files(snapshot.folder))
        except Exception as error:
            logger.warning(
                "Could not push %r to the Hub repository %s: %s Nothing is lost; what it left out goes with the next.",
                push.message,
                self.repo_id or self.model_id,
                reason(error),
            )
            raise
        finally:
            drop(snapshot)

    def _commit(self, push: Push, files: Mapping[str, Path]) -> Any:
        """Commit, and delete what is stale in whole folders; those of a failed push go with the next one."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        self.num_pushes += 1
        try:
            with _progress_bars(push.shows_progress):
                repo_id = self.repo_id or self.open_repo(token=push.token)
                self._make_branch(repo_id, push)
                stale = self._stale_files(repo_id, push, files)
                return self.api.create_commit(
                    repo_id,
                    operations=[
                        *(CommitOperationDelete(path_in_repo=name) for name in stale),
                        *(CommitOperationAdd(path_in_repo=name, path_or_fileobj=files[name]) for name in files),
                    ],
                    commit_message=push.message,
                    revision=push.revision,
                    token=push.token,
                )
        except BaseException:
            self.num_failed += 1
            self._next_folders = {**push.folders, **self._next_folders}
            raise

    def _make_branch(self, repo_id: str, push: Push) -> None:
        if push.revision is None or push.revision in self._branches or _NO_BRANCH.fullmatch(push.revision):
            return
        self.api.create_branch(repo_id, branch=push.revision, token=push.token, exist_ok=True)
        self._branches.add(push.revision)

    def _stale_files(self, repo_id: str, push: Push, files: Mapping[str, Path]) -> list[str]:
        """List the files of the repository in the folders of a push that the push does not contain."""
        if not push.folders:
            return []
        existing = self.api.list_repo_files(repo_id, revision=push.revision, token=push.token)
        return [name for name in existing if name.split("/")[0] in push.folders and name not in files]


def reason(error: BaseException) -> str:
    """Return the text of an error of the Hub and of its causes; keeps no reference to the error."""
    cause = error.__cause__
    text = f"{type(error).__name__}: {str(error).strip()}"
    # httpx wraps errors of httpcore with the same text.
    return text if cause is None or str(cause) == str(error) else f"{text} ({reason(cause)})"


def _all_files(push: Push) -> dict[str, Path]:
    files = dict(push.files)
    for name, folder in push.folders.items():
        files.update(folder_files(folder, under=name))
    return files


@contextmanager
def _progress_bars(is_shown: bool) -> Iterator[None]:
    """Hide huggingface_hub's progress bars, unless its environment variable decides."""
    from huggingface_hub import constants
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if is_shown or constants.HF_HUB_DISABLE_PROGRESS_BARS is not None or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
