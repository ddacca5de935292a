"""Writing text with a trained model, from a prompt or from a saved state."""
