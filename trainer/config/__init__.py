"""Configuration: schema, older keys, rules between sections."""

from trainer.config.schema import BpttWindow, CheckpointConfig, DataConfig, ModelConfig, RunConfig, TrainerConfig

__all__ = ["BpttWindow", "CheckpointConfig", "DataConfig", "ModelConfig", "RunConfig", "TrainerConfig"]
