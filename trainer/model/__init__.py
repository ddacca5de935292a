"""The RWKV-7 network. Needs PyTorch alone."""
