"""Back-propagation through time over chunks: planned with integers (`plan`), then run (`step`)."""
