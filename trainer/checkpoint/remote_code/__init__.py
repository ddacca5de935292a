"""Files that Hugging Face exports bring along; the trainer copies them and never imports them.

Each must stand alone beside a config.json, with transformers 4.48 or newer and PyTorch.
"""
