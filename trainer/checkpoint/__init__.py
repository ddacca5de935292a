"""Checkpoints: writing them whole, finding the newest valid one, reading weights of any origin, exporting."""

from trainer.checkpoint.atomic import (
    abandon_folder,
    atomic_folder,
    begin_folder,
    commit_folder,
    prepare_directory,
    prune,
    sweep,
)
from trainer.checkpoint.export import export_checkpoint, save_weights
from trainer.checkpoint.find import find_checkpoints, newest_valid, resolve_resume
from trainer.checkpoint.lock import RunLock
from trainer.checkpoint.read import peek_shape, read_weights
from trainer.checkpoint.rng import capture_rng, restore_rng
from trainer.checkpoint.write import (
    CheckpointPayload,
    read_checkpoint_json,
    read_checkpoint_tensors,
    write_checkpoint,
)

__all__ = [
    "CheckpointPayload",
    "RunLock",
    "abandon_folder",
    "atomic_folder",
    "begin_folder",
    "capture_rng",
    "commit_folder",
    "export_checkpoint",
    "find_checkpoints",
    "newest_valid",
    "peek_shape",
    "prepare_directory",
    "prune",
    "read_checkpoint_json",
    "read_checkpoint_tensors",
    "read_weights",
    "resolve_resume",
    "restore_rng",
    "save_weights",
    "sweep",
    "write_checkpoint",
]
