"""RWKV-7 trainer: exact back-propagation through documents of any length at constant memory."""

__version__ = "0.1.0"
