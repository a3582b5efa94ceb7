"""absl entry points and experiment configs."""
