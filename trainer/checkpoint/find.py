"""Choosing the checkpoint to continue from: by manifest and step number, never by time stamp or pointer file."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from trainer.checkpoint.atomic import step_folders
from trainer.checkpoint.verify import verify_folder
from trainer.errors import CheckpointError, ResumeError
from trainer.logs import get_logger

__all__ = ["Rejected", "find_checkpoints", "newest_valid", "resolve_resume"]

logger = get_logger(__name__)


class Rejected(NamedTuple):
    """A checkpoint folder that was passed over."""

    path: Path
    reason: str


def find_checkpoints(directory: Path) -> list[Path]:
    """Folders named step-N in a run's checkpoint folder, oldest step first; nothing is verified."""
    return step_folders(directory) if directory.is_dir() else []


def _mention_foreign(directory: Path, chosen: list[Path]) -> None:
    ours = {path.name for path in chosen}
    foreign = sorted(path.name for path in directory.iterdir() if path.name not in ours and path.name[0] != ".")
    weights = [name for name in foreign if name.endswith((".pth", ".ckpt", ".safetensors", ".tmp"))]
    if weights:
        logger.info("%s: ignoring files that are no checkpoints of this run: %s", directory, ", ".join(weights))


def newest_valid(directory: Path) -> tuple[Path | None, list[Rejected]]:
    """The checkpoint with the highest step whose manifest and files verify, and those rejected on the way.

    Args:
        directory: the run's checkpoint folder; it may be missing.

    Returns:
        (folder, rejected); the folder is None if there is no checkpoint at all.

    Raises:
        ResumeError: if there are checkpoints but none is valid; a run must not start afresh without being told.
    """
    candidates = find_checkpoints(directory)
    if directory.is_dir():
        _mention_foreign(directory, candidates)
    rejected: list[Rejected] = []
    for folder in reversed(candidates):
        try:
            verify_folder(folder)
        except CheckpointError as err:
            rejected.append(Rejected(folder, str(err)))
            logger.warning("rejected %s: %s", folder.name, err)
        else:
            logger.info("newest valid checkpoint: %s", folder)
            return folder, rejected
    if rejected:
        raise ResumeError(
            directory,
            f"no valid checkpoint; {len(rejected)} rejected, the newest because {rejected[0].reason}",
            fix="restore one of them, or start over with `resume: never` in an empty folder",
        )
    aside = sorted(path.name for path in directory.glob("set-aside-*"))
    if aside:
        logger.warning("%s has no checkpoint; earlier ones are in %s: move one back to continue it", directory, aside)
    return None, []


def resolve_resume(resume: str, directory: Path) -> Path | None:
    """The checkpoint that a run continues from.

    Args:
        resume: `auto` (the newest valid one, or none if there is none), `never`, or the path of one.
        directory: the run's checkpoint folder.

    Raises:
        CheckpointError: if an explicit path is missing or damaged.
        ResumeError: if `auto` finds checkpoints of which none is valid.
    """
    if resume == "auto":
        return newest_valid(directory)[0]
    if resume == "never":
        present = find_checkpoints(directory)
        if present:
            logger.warning("%s holds %s, which `resume: never` ignores", directory, present[-1].name)
        return None
    folder = Path(resume)
    if not folder.exists():
        raise CheckpointError(f"resume: {resume}", "no such checkpoint", fix="give an existing step-N folder, or auto")
    if not folder.is_dir():
        problem = "a file, not a checkpoint folder"
        raise CheckpointError(f"resume: {resume}", problem, fix="start from weights alone with model.load_model")
    verify_folder(folder)
    return folder
